"""The side `torch`: torch.nn.Embedding(sparse=True) with its optimizers; index_select(out=)."""

import warnings

import torch

import peer

warnings.filterwarnings('ignore')


class Torch(peer.Peer):

  def make_table(self, opt, rows, dim, init):
    weight = torch.full((rows, dim), init)
    self.out = None
    self.embedding = torch.nn.Embedding(rows, dim, sparse=True, _weight=weight)
    params = self.embedding.parameters()
    # The hyper-parameters are the defaults of include/frugal.h.
    if opt == 'sgd':
      self.optimizer = torch.optim.SGD(params, lr=0.01)
    elif opt == 'adagrad':
      self.optimizer = torch.optim.Adagrad(params, lr=0.01, eps=1e-8)
    elif opt == 'adam':
      self.optimizer = torch.optim.SparseAdam(params, lr=0.01, eps=1e-8)
    else:
      raise ValueError(f'torch has no {opt}')
    for state in self.optimizer.state.values():  # memory is touched before the clock runs
      for value in state.values():
        if value.numel() > 1:
          value.fill_(0)

  def drop_table(self):
    self.embedding = self.optimizer = None

  def train(self, keys, grads):
    self.optimizer.zero_grad(set_to_none=True)
    self.embedding(keys).backward(grads)
    self.optimizer.step()

  def gather(self, keys):
    if self.out is None:
      self.out = torch.empty(len(keys), self.embedding.weight.shape[1])
    torch.index_select(self.embedding.weight.data, 0, keys, out=self.out)

  def rows(self):
    return self.embedding.weight


peer.serve(Torch())
