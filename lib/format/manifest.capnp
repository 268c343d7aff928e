# The message of a manifest (docs/format.md, "Manifest"). It is on disk: a field keeps its number,
# type and meaning for ever. A reader must understand all of it, so a new field needs a bit of
# features in the envelope, unless a reader that does not know it is right all the same.
@0xb6c0a1d95f27e384;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("frugal::disk");

struct Manifest {
  step @0 :UInt64;  # the snapshot step; 2^64 - 1: no step is committed
  seed @1 :UInt64;
  worldSize @2 :UInt32;
  name @3 :Text;
  created @4 :UInt64;  # seconds since 1970
  nextTable @5 :UInt64;
  nextFile @6 :UInt64;
  tables @7 :List(Table);  # by number
  blobBytes @8 :UInt64;  # length of the file <sequence>.blob; 0: there is none
  blobs @9 :List(Blob);  # by rank
}

struct Table {
  number @0 :UInt64;
  name @1 :Text;
  # frugal_table_config, as the table was created
  keySpace @2 :Int32;
  dtype @3 :Int32;
  rows @4 :UInt64;
  dim @5 :UInt32;
  init @6 :Int32;
  initA @7 :Float32;
  initB @8 :Float32;
  nanPolicy @9 :Int32;
  flags @10 :UInt32;
  created @11 :Optimizer;
  # what holds from the step on that follows the snapshot step
  optimizer @12 :Optimizer;
  later @13 :List(Later);  # by first step
  hasState @14 :Bool;
  # rows
  element @15 :UInt32;  # 1: fp32; 2: fp16; 3: bfloat16
  stateColumns @16 :UInt32;
  valueBytes @17 :UInt32;
  stateColumnBytes @18 :UInt32;
  liveRows @19 :UInt64;
  files @20 :List(File);  # by number
}

struct File {
  number @0 :UInt64;
  sequence @1 :UInt64;
  records @2 :UInt64;
  entries @3 :UInt64;
  length @4 :UInt64;
  checksum @5 :UInt64;
  live @6 :UInt64;
}

struct Later {
  firstStep @0 :UInt64;
  optimizer @1 :Optimizer;
}

struct Blob {
  rank @0 :UInt32;
  at @1 :UInt64;
  bytes @2 :UInt64;
  checksum @3 :UInt64;
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
