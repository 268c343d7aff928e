// Random ids of a table: uniform, or Zipf's law by rejection-inversion.
//
// Zipf: W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from monotone
// discrete distributions", ACM TOMACS 6 (1996): exact, and without a table of n entries. Rank k
// (1 is the hottest) has probability proportional to k^-s. Ranks become ids by a bijection, so
// that hot rows are not next to one another.
#ifndef FRUGAL_BENCH_ZIPF_H_
#define FRUGAL_BENCH_ZIPF_H_

#include <cmath>
#include <cstdint>
#include <numeric>

#include "harness.h"

namespace bench {

class Zipf {
 public:
  Zipf(uint64_t n, double s) : n_(n), s_(s) {
    h_x1_ = H(1.5) - 1.0;
    h_n_ = H(static_cast<double>(n) + 0.5);
    cut_ = 2.0 - HInverse(H(2.5) - Weight(2.0));
  }

  uint64_t Rank(Random* random) const {
    for (;;) {
      const double u = h_n_ + random->Uniform() * (h_x1_ - h_n_);
      const double x = HInverse(u);
      double k = std::floor(x + 0.5);
      if (k < 1) k = 1;
      if (k > static_cast<double>(n_)) k = static_cast<double>(n_);
      if (k - x <= cut_ || u >= H(k + 0.5) - Weight(k)) return static_cast<uint64_t>(k);
    }
  }

 private:
  double Weight(double x) const { return std::exp(-s_ * std::log(x)); }
  // The integral of x^-s, written so that s near 1 is well conditioned.
  double H(double x) const {
    const double log_x = std::log(x);
    return Expm1OverX((1 - s_) * log_x) * log_x;
  }
  double HInverse(double x) const {
    double t = x * (1 - s_);
    if (t < -1) t = -1;
    return std::exp(Log1pOverX(t) * x);
  }
  static double Expm1OverX(double x) {
    return std::abs(x) > 1e-8 ? std::expm1(x) / x : 1 + x / 2 * (1 + x / 3);
  }
  static double Log1pOverX(double x) {
    return std::abs(x) > 1e-8 ? std::log1p(x) / x : 1 - x * (0.5 - x / 3);
  }

  uint64_t n_;
  double s_, h_x1_, h_n_, cut_;
};

// Ids 0..n-1 of a distribution: "uniform", or "zipf" followed by its exponent.
class Ids {
 public:
  Ids(const std::string& dist, uint64_t n, uint64_t seed) : n_(n), random_(seed), zipf_(n, 1.0) {
    zipfian_ = dist.rfind("zipf", 0) == 0;
    if (zipfian_) {
      zipf_ = Zipf(n, std::stod(dist.substr(4)));
    } else if (dist != "uniform") {
      throw std::runtime_error("unknown distribution " + dist);
    }
    while (std::gcd(multiplier_, n) != 1) multiplier_ += 2;
  }
  uint64_t Next() {
    if (!zipfian_) return random_.Below(n_);
    const unsigned __int128 rank = zipf_.Rank(&random_) - 1;
    return static_cast<uint64_t>((rank * multiplier_ + 12345) % n_);
  }

 private:
  uint64_t n_;
  Random random_;
  Zipf zipf_;
  bool zipfian_;
  uint64_t multiplier_ = 2654435761;
};

}  // namespace bench

#endif  // FRUGAL_BENCH_ZIPF_H_
