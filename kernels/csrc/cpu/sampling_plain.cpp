#include "sampling_kernel.h"
