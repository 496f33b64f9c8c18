#include "linear_kernel.h"
