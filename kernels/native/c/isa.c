// Products and the operations between them, for one kind of CPU. Like attend.c, compiled once for each kind, with
// -DLEVEL=name and the features of that CPU.
#include "linear_quantized.c"
#include "layer.c"
#include "gated_delta.c"
// A product and a sum, so that a test can check that they are rounded separately
EXPORT(unfused)(float *x) { return x[3] = x[0] * x[1] + x[2], 1; }
