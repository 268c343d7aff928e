# The control plane between a controller and its trainer processes
# (docs/processes.md, "The control socket").
#
# Both sides are of one build. `attach` checks that, so its request and the status of its reply must
# never change.
@0xfc5283fb45a74ac4;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("frugal::wire");

struct Request {
  id @0 :UInt64;  # its reply has the same; no other request of the connection has it
  union {
    attach @1 :UInt32;  # the version: the first request, and no other
    ping @2 :Void;
    open @3 :Config;
    createTable @4 :TableConfig;
    findTable @5 :Text;
    dropTable @6 :UInt64;
    join @7 :TrainerConfig;
    leave @8 :Leave;
    stats @9 :Void;
    health @10 :Void;
    committed @11 :Void;
  }
}

struct Leave {
  rank @0 :UInt32;
  lost @1 :Bool;
  joined @2 :UInt64;
}

struct Answer {
  id @0 :UInt64;
  # How the call ended: frugal_error. If the status is not 0, only these four and the id are set.
  status @1 :Int32;
  systemCode @2 :Int32;
  deviceCode @3 :Int32;
  message @4 :Text;
  # What the plain fields do not hold. The caller and the engine know the meaning of each item.
  descriptors @5 :UInt32;  # how many come with the message
  numbers @6 :List(UInt64);
  union {
    done @7 :Void;  # of stats: the numbers are frugal_stats
    config @8 :Config;
    table @9 :Table;
    joined @10 :UInt32;  # the rank
    health @11 :Int32;
    step @12 :UInt64;
  }
}

struct Table {
  id @0 :UInt64;
  info @1 :TableInfo;
}

# The structs of frugal.h, without their pointers. An empty text means NULL.

struct Config {  # frugal_config
  worldSize @0 :UInt32;
  lookahead @1 :UInt32;
  flushThreads @2 :UInt32;
  flushMode @3 :Int32;
  staleness @4 :UInt64;
  pendingBytes @5 :UInt64;
  hostBytes @6 :UInt64;
  timeoutMs @7 :Int64;
  backing @8 :Int32;
  flags @9 :UInt32;
  seed @10 :UInt64;
}

struct Optimizer {  # frugal_optimizer
  kind @0 :Int32;
  lr @1 :Float32;
  eps @2 :Float32;
  momentum @3 :Float32;
  dampening @4 :Float32;
  beta1 @5 :Float32;
  beta2 @6 :Float32;
  rho @7 :Float32;
  ftrlLambda1 @8 :Float32;
  ftrlLambda2 @9 :Float32;
  ftrlBeta @10 :Float32;
  initialAccumulator @11 :Float32;
  weightDecayL2 @12 :Float32;
  weightDecay @13 :Float32;
  clipValue @14 :Float32;
  clipNorm @15 :Float32;
  weightBound @16 :Float32;
  gradScale @17 :Float32;
  flags @18 :UInt32;
}

struct TableConfig {  # frugal_table_config
  name @0 :Text;
  keySpace @1 :Int32;
  dtype @2 :Int32;
  rows @3 :UInt64;
  dim @4 :UInt32;
  init @5 :Int32;
  initA @6 :Float32;
  initB @7 :Float32;
  nanPolicy @8 :Int32;
  flags @9 :UInt32;
  optimizer @10 :Optimizer;
}

struct TableInfo {  # frugal_table_info
  rows @0 :UInt64;
  capacity @1 :UInt64;
  valueBytes @2 :UInt64;
  stateFloats @3 :UInt64;
  memoryBytes @4 :UInt64;
  dim @5 :UInt32;
  keySpace @6 :Int32;
  optimizer @7 :Int32;
  pageBytes @8 :UInt32;
}

struct TrainerConfig {  # frugal_trainer_config
  device @0 :Text;
  rank @1 :UInt32;
  flags @2 :UInt32;
  cacheBytes @3 :UInt64;
  cacheRatio @4 :Float64;
}
