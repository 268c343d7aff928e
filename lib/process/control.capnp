# The control plane between a controller and its trainer processes: docs/processes.md, section 3.
# Both sides are of one build; `attach` tells whether they are: the request and the status of its answer must never change.
@0xfc5283fb45a74ac4;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("frugal::wire");

struct Request {
  id @0 :UInt64;  # its answer's; of no other request of the connection
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
  # How the call ended: frugal_error. Beside a status other than 0 nothing else is set.
  status @1 :Int32;
  systemCode @2 :Int32;
  deviceCode @3 :Int32;
  message @4 :Text;
  # What is given beside plain fields; the caller and the engine know what is where.
  descriptors @5 :UInt32;  # how many have come with the message
  numbers @6 :List(UInt64);
  union {
    done @7 :Void;
    config @8 :Config;
    table @9 :Table;
    joined @10 :UInt32;  # the rank
    stats @11 :Stats;
    health @12 :Int32;
    step @13 :UInt64;
  }
}

struct Table {
  id @0 :UInt64;
  info @1 :TableInfo;
}

# The structs of frugal.h, without their pointers; a text that is empty stands for NULL.

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

struct Stats {  # frugal_stats
  stepsCommitted @0 :UInt64;
  stepsAborted @1 :UInt64;
  keysDeclared @2 :UInt64;
  keysLookedUp @3 :UInt64;
  keysUndeclared @4 :UInt64;
  keysPushed @5 :UInt64;
  rowsCreated @6 :UInt64;
  rowsUpdated @7 :UInt64;
  rowsDeferred @8 :UInt64;
  gateWaits @9 :UInt64;
  gateWaitNs @10 :UInt64;
  gateInFlight @11 :UInt64;
  lookupWaits @12 :UInt64;
  priorityRises @13 :UInt64;
  priorityFalls @14 :UInt64;
  enqueued @15 :UInt64;
  dequeued @16 :UInt64;
  backPressure @17 :UInt64;
  ranksApart @18 :UInt64;
  staleReads @19 :UInt64;
  cacheHits @20 :UInt64;
  cacheMisses @21 :UInt64;
  cacheAdmitted @22 :UInt64;
  cacheEvicted @23 :UInt64;
  cacheEvictedDirty @24 :UInt64;
  pendingBytes @25 :UInt64;
  pendingBytesPeak @26 :UInt64;
  pendingRows @27 :UInt64;
  activeRows @28 :UInt64;
  modesAtOnce @29 :UInt64;
  modesDeferred @30 :UInt64;
  lookupNs @31 :UInt64;
  pushNs @32 :UInt64;
  stepBeginNs @33 :UInt64;
  stepEndNs @34 :UInt64;
  prefetchNs @35 :UInt64;
  entryNs @36 :UInt64;
  applyNs @37 :UInt64;
  cacheTurns @38 :UInt64;
  cachePlanned @39 :UInt64;
}
