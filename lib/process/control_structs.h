// The structs of frugal.h as they are in messages (control.capnp), and back.
#pragma once
#include "control.capnp.h"
#include "frugal.h"

namespace frugal {

void put(const frugal_config& from, wire::Config::Builder to);
void put(const frugal_table_config& from, wire::TableConfig::Builder to);
void put(const frugal_table_info& from, wire::TableInfo::Builder to);
void put(const frugal_trainer_config& from, wire::TrainerConfig::Builder to);

// Every field is set; texts stay in the message.
void take(wire::Config::Reader from, frugal_config* to);
void take(wire::TableConfig::Reader from, frugal_table_config* to);
void take(wire::TableInfo::Reader from, frugal_table_info* to);
void take(wire::TrainerConfig::Reader from, frugal_trainer_config* to);

}  // namespace frugal
