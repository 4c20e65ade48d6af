// All kernels for one kind of CPU; compiled once for each, with -DLEVEL=name and what that CPU has.
#include "linear.c"
#include "attend.c"
#include "layer.c"
