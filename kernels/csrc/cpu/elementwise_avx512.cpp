#include "elementwise_kernel.h"
