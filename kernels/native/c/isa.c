// Products and what stands between them, for one kind of CPU; compiled once for each, as attend.c is, with -DLEVEL=name and
// what that CPU has.
#include "linear_quantized.c"
#include "layer.c"
#include "gated_delta.c"
// A product and a sum, so that a test can see that they are rounded apart
EXPORT(unfused)(float *x) { return x[3] = x[0] * x[1] + x[2], 1; }
