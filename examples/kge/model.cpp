#include "model.h"

#include <cmath>

namespace kge {
namespace {

// Sixteen partial sums, so that the compiler can use vectors of any width without changing a bit.
template <typename Term>
float Sum(size_t n, Term term) {
  float lanes[16] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (size_t l = 0; l < 16; ++l) lanes[l] += term(i + l);
  }
  for (size_t l = 0; i < n; ++i, ++l) lanes[l] += term(i);
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

void Norms(size_t count, size_t dim, const float* rows, float* norms) {
  for (size_t i = 0; i < count; ++i) {
    const float* x = rows + i * dim;
    norms[i] = Sum(dim, [x](size_t k) { return x[k] * x[k]; });
  }
}

}  // namespace

void MakeQueries(Model model, Side side, size_t count, size_t dim, const float* x, const float* r,
                 float* q) {
  const size_t half = dim / 2;
  for (size_t i = 0; i < count; ++i, x += dim, r += dim, q += dim) {
    switch (model) {
      case Model::kTransEL1:
      case Model::kTransEL2:
        if (side == Side::kTail) {
          for (size_t k = 0; k < dim; ++k) q[k] = x[k] + r[k];
        } else {
          for (size_t k = 0; k < dim; ++k) q[k] = x[k] - r[k];
        }
        break;
      case Model::kDistMult:
        for (size_t k = 0; k < dim; ++k) q[k] = x[k] * r[k];
        break;
      case Model::kComplEx: {
        const float sign = side == Side::kTail ? 1.0f : -1.0f;
        for (size_t k = 0; k < half; ++k) {
          const float im = sign * r[half + k];
          q[k] = x[k] * r[k] - x[half + k] * im;
          q[half + k] = x[k] * im + x[half + k] * r[k];
        }
        break;
      }
      case Model::kSimplE: {
        const float* r1 = side == Side::kTail ? r : r + half;
        const float* r2 = side == Side::kTail ? r + half : r;
        for (size_t k = 0; k < half; ++k) {
          q[k] = 0.5f * (r2[k] * x[half + k]);
          q[half + k] = 0.5f * (r1[k] * x[k]);
        }
        break;
      }
    }
  }
}

void QueryGradients(Model model, Side side, size_t count, size_t dim, const float* x,
                    const float* r, const float* gq, float* gx, float* gr) {
  const size_t half = dim / 2;
  for (size_t i = 0; i < count; ++i, x += dim, r += dim, gq += dim, gx += dim, gr += dim) {
    switch (model) {
      case Model::kTransEL1:
      case Model::kTransEL2:
        if (side == Side::kTail) {
          for (size_t k = 0; k < dim; ++k) gx[k] += gq[k], gr[k] += gq[k];
        } else {
          for (size_t k = 0; k < dim; ++k) gx[k] += gq[k], gr[k] -= gq[k];
        }
        break;
      case Model::kDistMult:
        for (size_t k = 0; k < dim; ++k) {
          gx[k] += gq[k] * r[k];
          gr[k] += gq[k] * x[k];
        }
        break;
      case Model::kComplEx: {
        const float sign = side == Side::kTail ? 1.0f : -1.0f;
        for (size_t k = 0; k < half; ++k) {
          const float re = gq[k], im = gq[half + k];
          const float r_im = sign * r[half + k];
          gx[k] += re * r[k] + im * r_im;
          gx[half + k] += im * r[k] - re * r_im;
          gr[k] += re * x[k] + im * x[half + k];
          gr[half + k] += sign * (im * x[k] - re * x[half + k]);
        }
        break;
      }
      case Model::kSimplE: {
        const size_t at1 = side == Side::kTail ? 0 : half;
        const size_t at2 = half - at1;
        for (size_t k = 0; k < half; ++k) {
          const float g1 = 0.5f * gq[half + k], g2 = 0.5f * gq[k];
          gx[k] += g1 * r[at1 + k];
          gx[half + k] += g2 * r[at2 + k];
          gr[at1 + k] += g1 * x[k];
          gr[at2 + k] += g2 * x[half + k];
        }
        break;
      }
    }
  }
}

void RegularizerGradients(Model model, size_t count, size_t dim, float coefficient,
                          const float* rows, float* grads) {
  const float factor = 3.0f * coefficient;
  if (model != Model::kComplEx) {
    for (size_t k = 0; k < count * dim; ++k) grads[k] += factor * std::fabs(rows[k]) * rows[k];
    return;
  }
  const size_t half = dim / 2;
  for (size_t i = 0; i < count; ++i, rows += dim, grads += dim) {
    for (size_t k = 0; k < half; ++k) {
      const float re = rows[k], im = rows[half + k];
      const float scale = factor * std::sqrt(re * re + im * im);
      grads[k] += scale * re;
      grads[half + k] += scale * im;
    }
  }
}

float* Scorer::Scratch(size_t floats) {
  if (scratch_.size() < floats) scratch_.resize(floats);
  return scratch_.data();
}

void Scorer::Scores(size_t candidates, const float* candidate_rows, size_t queries,
                    const float* query_rows, float* scores) {
  const Matrix a{candidate_rows, dim_, 1};
  const Matrix b{query_rows, 1, dim_};
  const size_t padded = Padded(queries);
  float* scratch = Scratch(dim_ * (queries + 3 * kLanes));
  if (model_ == Model::kTransEL1) {
    kernels_.distance_l1(candidates, queries, dim_, a, b, scores, padded, scratch);
    kernels_.scale(candidates * padded, -1.0f, scores);
    return;
  }
  kernels_.multiply(candidates, queries, dim_, a, b, scores, padded, false, scratch);
  if (model_ == Model::kTransEL2) {
    query_norms_.resize(padded);
    candidate_norms_.resize(candidates);
    Norms(queries, dim_, query_rows, query_norms_.data());
    Norms(candidates, dim_, candidate_rows, candidate_norms_.data());
    kernels_.distance_l2(candidates, padded, query_norms_.data(), candidate_norms_.data(), scores);
  }
}

void Scorer::PairScores(size_t count, const float* q, const float* x, float* scores) {
  for (size_t i = 0; i < count; ++i, q += dim_, x += dim_) {
    switch (model_) {
      case Model::kTransEL1:
        scores[i] = -Sum(dim_, [=](size_t k) { return std::fabs(q[k] - x[k]); });
        break;
      case Model::kTransEL2: {
        const float square =
            Sum(dim_, [=](size_t k) { return (q[k] - x[k]) * (q[k] - x[k]); });
        scores[i] = -std::sqrt(square > 1e-8f ? square : 1e-8f);
        break;
      }
      default:
        scores[i] = Sum(dim_, [=](size_t k) { return q[k] * x[k]; });
    }
  }
}

void Scorer::Gradients(size_t candidates, const float* candidate_rows, size_t queries,
                       const float* query_rows, const float* scores, float* weights,
                       float* candidate_grads, float* query_grads) {
  const size_t padded = Padded(queries);
  if (model_ == Model::kTransEL1) {
    kernels_.gradient_l1(candidates, queries, dim_, weights, padded, query_rows, candidate_rows,
                         query_grads, candidate_grads, Scratch(64 * candidates));
    return;
  }
  if (model_ == Model::kTransEL2) {
    // d(-|q - e|)/dq = (e - q) / |q - e|: with v = weight / |q - e| the sums over e are products
    // of matrices, those over q are sums of v.
    query_norms_.assign(padded, 0.0f);
    for (size_t j = 0; j < candidates; ++j) {
      float* w = weights + j * padded;
      const float* s = scores + j * padded;
      for (size_t i = 0; i < queries; ++i) w[i] /= -s[i];
      for (size_t i = 0; i < queries; ++i) query_norms_[i] += w[i];
      const float sum = Sum(queries, [w](size_t i) { return w[i]; });
      const float* e = candidate_rows + j * dim_;
      float* ge = candidate_grads + j * dim_;
      for (size_t k = 0; k < dim_; ++k) ge[k] -= sum * e[k];
    }
    for (size_t i = 0; i < queries; ++i) {
      const float* q = query_rows + i * dim_;
      float* gq = query_grads + i * dim_;
      for (size_t k = 0; k < dim_; ++k) gq[k] -= query_norms_[i] * q[k];
    }
  }
  float* scratch =
      Scratch((candidates > queries ? candidates : queries) * (dim_ + 3 * kLanes));
  kernels_.multiply(candidates, dim_, queries, {weights, padded, 1}, {query_rows, dim_, 1},
                    candidate_grads, dim_, true, scratch);
  kernels_.multiply(queries, dim_, candidates, {weights, 1, padded}, {candidate_rows, dim_, 1},
                    query_grads, dim_, true, scratch);
}

void Scorer::PairGradients(size_t count, const float* q, const float* x, const float* scores,
                           const float* weights, float* gx, float* gq) {
  for (size_t i = 0; i < count; ++i, q += dim_, x += dim_, gx += dim_, gq += dim_) {
    const float w = weights[i];
    switch (model_) {
      case Model::kTransEL1:
        for (size_t k = 0; k < dim_; ++k) {
          const float g = std::copysign(1.0f, q[k] - x[k]) * w;
          gq[k] -= g;
          gx[k] += g;
        }
        break;
      case Model::kTransEL2: {
        const float v = w / -scores[i];
        for (size_t k = 0; k < dim_; ++k) {
          const float g = v * (q[k] - x[k]);
          gq[k] -= g;
          gx[k] += g;
        }
        break;
      }
      default:
        for (size_t k = 0; k < dim_; ++k) {
          gq[k] += w * x[k];
          gx[k] += w * q[k];
        }
    }
  }
}

}  // namespace kge
