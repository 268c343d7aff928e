"""The side `fbgemm`: FBGEMM's table-batched embedding on the CPU, with its fused optimizers."""

import logging

logging.disable(logging.WARNING)  # "no entry for 1.6.0": known, and it works

# pylint: disable=wrong-import-position
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen)

import peer

OPTIMIZERS = {
    'sgd': EmbOptimType.EXACT_SGD,
    'rowwise_adagrad': EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    'adagrad': EmbOptimType.EXACT_ADAGRAD,
}


class Fbgemm(peer.Peer):

  def make_table(self, opt, rows, dim, init):
    # Bags of one key: FBGEMM's CPU path without pooling is 10 to 30 times slower.
    self.table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OPTIMIZERS[opt], learning_rate=0.01, eps=1e-8,
        pooling_mode=PoolingMode.SUM)
    with torch.no_grad():
      self.weights().fill_(init)
    for states in self.table.split_optimizer_states():  # touched before the clock runs
      for state in states:
        state.fill_(0)
    self.offsets = {}

  def weights(self):
    return self.table.split_embedding_weights()[0]

  def drop_table(self):
    self.table = None

  def forward(self, keys):
    count = len(keys)
    if count not in self.offsets:
      self.offsets[count] = torch.arange(count + 1)
    return self.table(keys, self.offsets[count])

  def train(self, keys, grads):
    self.forward(keys).backward(grads)

  def gather(self, keys):
    self.forward(keys)

  def rows(self):
    return self.weights()


peer.serve(Fbgemm())
