#include "limits_kernel.h"
