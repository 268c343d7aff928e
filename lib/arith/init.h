// Initial values of rows: docs/arithmetic.md, "Initial values"; the same on host and device.
//
// What: a hash of (seed, table name, key, column) makes a uniform double, which a distribution
// turns into the value. Nothing but + - * / and square root in double is used, so that every
// machine gives the same bits.
// Callers: the engine makes an InitSpec once for a table; the initialize kernel calls the rest.
#ifndef FRUGAL_ARITH_INIT_H_
#define FRUGAL_ARITH_INIT_H_

#include <string.h>

#include "arith/hd.h"
#include "arith/nan.h"
#include "arith/optimizer.h"
#include "frugal.h"

namespace frugal::arith {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
inline constexpr double kTwoToMinus53 = 1.0 / 9007199254740992.0;
// Probability below minus two standard deviations.
inline constexpr double kTailOfTwo = 0.022750131948179195;

// splitmix64's finalizer.
FRUGAL_HD uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x;
}

// A table's term of the hash. `name` has `length` bytes.
inline uint64_t table_hash(uint64_t seed, const char* name, size_t length) {
  uint64_t h = 0xcbf29ce484222325u;
  for (size_t i = 0; i < length; ++i) {
    h = (h ^ static_cast<unsigned char>(name[i])) * 0x100000001b3u;
  }
  return mix(seed + h);
}

FRUGAL_HD uint64_t row_hash(uint64_t table, uint64_t key) {
  return mix(table ^ mix(key + kGolden));
}

FRUGAL_HD uint64_t column_bits(uint64_t row, uint32_t column) {
  return mix(row + (static_cast<uint64_t>(column) + 1) * kGolden);
}

// In [0, 1).
FRUGAL_HD double unit_value(uint64_t bits) {
  return static_cast<double>(static_cast<int64_t>(bits >> 11)) * kTwoToMinus53;
}

// In (0, 1).
FRUGAL_HD double open_unit_value(uint64_t bits) {
  return static_cast<double>(static_cast<int64_t>((bits >> 12) * 2 + 1)) * kTwoToMinus53;
}

// The natural logarithm of a normal positive x, within a few units in the last place.
FRUGAL_HD double natural_log(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int32_t e = static_cast<int32_t>(bits >> 52) - 1022;
  bits = (bits & 0x000fffffffffffffu) | 0x3fe0000000000000u;
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m < 0.70710678118654752) {
    m = 2.0 * m;
    e = e - 1;
  }
  const double t = (m - 1.0) / (m + 1.0);
  const double q = t * t;
  double s = 1.0 / 27.0;
  s = s * q + 1.0 / 25.0;
  s = s * q + 1.0 / 23.0;
  s = s * q + 1.0 / 21.0;
  s = s * q + 1.0 / 19.0;
  s = s * q + 1.0 / 17.0;
  s = s * q + 1.0 / 15.0;
  s = s * q + 1.0 / 13.0;
  s = s * q + 1.0 / 11.0;
  s = s * q + 1.0 / 9.0;
  s = s * q + 1.0 / 7.0;
  s = s * q + 1.0 / 5.0;
  s = s * q + 1.0 / 3.0;
  s = s * q + 1.0;
  return (2.0 * t) * s + static_cast<double>(e) * 0.69314718055994531;
}

// The normal quantile of p in (0, 1): Wichura's PPND16, algorithm AS 241 (1988).
FRUGAL_HD double normal_quantile(double p) {
  const double q = p - 0.5;
  if ((q < 0.0 ? -q : q) <= 0.425) {
    const double r = 0.180625 - q * q;
    double a = 2.5090809287301226727e+3;
    a = a * r + 3.3430575583588128105e+4;
    a = a * r + 6.7265770927008700853e+4;
    a = a * r + 4.5921953931549871457e+4;
    a = a * r + 1.3731693765509461125e+4;
    a = a * r + 1.9715909503065514427e+3;
    a = a * r + 1.3314166789178437745e+2;
    a = a * r + 3.3871328727963666080e+0;
    double b = 5.2264952788528545610e+3;
    b = b * r + 2.8729085735721942674e+4;
    b = b * r + 3.9307895800092710610e+4;
    b = b * r + 2.1213794301586595867e+4;
    b = b * r + 5.3941960214247510770e+3;
    b = b * r + 6.8718700749205790830e+2;
    b = b * r + 4.2313330701600911252e+1;
    b = b * r + 1.0;
    return (q * a) / b;
  }
  double r = root_double(-natural_log(q < 0.0 ? p : 1.0 - p));
  double z;
  if (r <= 5.0) {
    r = r - 1.6;
    double c = 7.74545014278341407640e-4;
    c = c * r + 2.27238449892691845833e-2;
    c = c * r + 2.41780725177450611770e-1;
    c = c * r + 1.27045825245236838258e+0;
    c = c * r + 3.64784832476320460504e+0;
    c = c * r + 5.76949722146069140550e+0;
    c = c * r + 4.63033784615654529590e+0;
    c = c * r + 1.42343711074968357734e+0;
    double d = 1.05075007164441684324e-9;
    d = d * r + 5.47593808499534494600e-4;
    d = d * r + 1.51986665636164571966e-2;
    d = d * r + 1.48103976427480074590e-1;
    d = d * r + 6.89767334985100004550e-1;
    d = d * r + 1.67638483018380384940e+0;
    d = d * r + 2.05319162663775882187e+0;
    d = d * r + 1.0;
    z = c / d;
  } else {
    r = r - 5.0;
    double c = 2.01033439929228813265e-7;
    c = c * r + 2.71155556874348757815e-5;
    c = c * r + 1.24266094738807843860e-3;
    c = c * r + 2.65321895265761230930e-2;
    c = c * r + 2.96560571828504891230e-1;
    c = c * r + 1.78482653991729133580e+0;
    c = c * r + 5.46378491116411436990e+0;
    c = c * r + 6.65790464350110377720e+0;
    double d = 2.04426310338993978564e-15;
    d = d * r + 1.42151175831644588870e-7;
    d = d * r + 1.84631831751005468180e-5;
    d = d * r + 7.86869131145613259100e-4;
    d = d * r + 1.48753612908506148525e-2;
    d = d * r + 1.36929880922735805310e-1;
    d = d * r + 5.99832206555887937690e-1;
    d = d * r + 1.0;
    z = c / d;
  }
  return q < 0.0 ? -z : z;
}

// What new rows of a table are filled with. A plain struct: device kernels take it by value.
struct InitSpec {
  int32_t kind;  // frugal_init_kind, with Xavier turned into uniform
  uint32_t dim;
  uint64_t table;  // table_hash()
  double origin;   // a; Xavier: -x
  double spread;   // uniform: b - a; Xavier: x - -x; normal: b
  float constant;  // constant: a, canonical
  uint32_t state_columns;
  uint32_t column_floats;
  float state[2];  // the fill of each state column
};

// Makes the spec of a table. `a` and `b` are init_a and init_b, `rows` the configured number,
// `optimizer_kind` and `initial_accumulator` those of the table's optimizer.
inline InitSpec init_spec(int32_t init_kind, float a, float b, uint64_t rows, uint32_t dim,
                          uint64_t table, int32_t optimizer_kind, float initial_accumulator) {
  InitSpec s = {};
  s.kind = init_kind;
  s.dim = dim;
  s.table = table;
  s.constant = canonical(a);
  s.origin = static_cast<double>(a);
  if (init_kind == FRUGAL_INIT_UNIFORM) {
    s.spread = static_cast<double>(b) - static_cast<double>(a);
  } else if (init_kind == FRUGAL_INIT_XAVIER) {
    const double fan_in = b == 0.0f ? static_cast<double>(rows) : static_cast<double>(b);
    const double x =
        static_cast<double>(a) * root_double(6.0 / (fan_in + static_cast<double>(dim)));
    s.kind = FRUGAL_INIT_UNIFORM;
    s.origin = -x;
    s.spread = x - -x;
  } else {
    s.spread = static_cast<double>(b);
  }
  s.state_columns = state_columns(optimizer_kind);
  s.column_floats = column_floats(optimizer_kind, dim);
  for (uint32_t c = 0; c < 2; ++c) {
    s.state[c] = initial_state(optimizer_kind, c, initial_accumulator);
  }
  return s;
}

// A bound on the magnitude of every element of a new row.
inline double initial_bound(const InitSpec& s) {
  const auto size = [](double x) { return x < 0.0 ? -x : x; };
  switch (s.kind) {
    case FRUGAL_INIT_UNIFORM: {
      const double low = size(s.origin), high = size(s.origin + s.spread);
      return low > high ? low : high;
    }
    case FRUGAL_INIT_NORMAL:
      return size(s.origin) + s.spread * -normal_quantile(open_unit_value(0));
    case FRUGAL_INIT_TRUNCATED_NORMAL:
      return size(s.origin) + s.spread * 2.0;
    default:
      return size(static_cast<double>(s.constant));
  }
}

// The initial value of one element; `bits` is column_bits().
FRUGAL_HD float initial_value(const InitSpec& s, uint64_t bits) {
  double value;
  switch (s.kind) {
    case FRUGAL_INIT_UNIFORM:
      value = s.origin + s.spread * unit_value(bits);
      break;
    case FRUGAL_INIT_NORMAL:
      value = s.origin + s.spread * normal_quantile(open_unit_value(bits));
      break;
    case FRUGAL_INIT_TRUNCATED_NORMAL:
      value = s.origin + s.spread * normal_quantile(kTailOfTwo + open_unit_value(bits) *
                                                                     (1.0 - 2.0 * kTailOfTwo));
      break;
    default:
      return s.constant;
  }
  return canonical(static_cast<float>(value));
}

}  // namespace frugal::arith

#endif  // FRUGAL_ARITH_INIT_H_
