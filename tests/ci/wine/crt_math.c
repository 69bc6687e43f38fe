// The complex functions that Wine's C runtime lacks, by MinGW's, with the arguments that MSVC's compiler hands over: numpy does not load
// without. Built as a DLL that forwards the others.
#include <complex.h>

typedef struct {
  float re, im;
} Single;
typedef struct {
  double re, im;
} Double;

#define SAME(name, Number, plain)                                                                                                  \
  Number wine_##name(Number z) {                                                                                                   \
    const plain complex out = name(z.re + z.im * I);                                                                               \
    return (Number){creal(out), cimag(out)};                                                                                       \
  }
#define REAL(name, Number, plain)                                                                                                  \
  plain wine_##name(Number z) { return name(z.re + z.im * I); }
#define POWER(name, Number, plain)                                                                                                 \
  Number wine_##name(Number z, Number w) {                                                                                         \
    const plain complex out = name(z.re + z.im * I, w.re + w.im * I);                                                              \
    return (Number){creal(out), cimag(out)};                                                                                       \
  }
// MSVC's long double is its double.
#define ALL(KIND, name)                                                                                                            \
  KIND(name##f, Single, float)                                                                                                     \
  KIND(name, Double, double)                                                                                                       \
  KIND(name##l, Double, double)

ALL(REAL, cabs)
ALL(REAL, carg)
ALL(REAL, creal)
ALL(REAL, cimag)
ALL(SAME, ccos)
ALL(SAME, ccosh)
ALL(SAME, cexp)
ALL(SAME, csin)
ALL(SAME, csinh)
ALL(SAME, ctan)
ALL(SAME, ctanh)
ALL(POWER, cpow)
