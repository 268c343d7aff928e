/* A later libfrugal.so.0, as far as tests/newer.rs asks: its structs have grown at their ends by 64
 * bytes, and its version is what FRUGAL_TEST_VERSION says. It is loaded before the real one. */
#include <stdlib.h>
#include <string.h>

#include "frugal.h"

#define GROWN(type, name, macro)                 \
  void name(type *out) {                         \
    struct {                                     \
      type old;                                  \
      unsigned char more[64];                    \
    } grown = {macro, {0}};                      \
    memset(grown.more, 0xab, sizeof grown.more); \
    grown.old.struct_size = sizeof grown;        \
    memcpy(out, &grown, sizeof grown);           \
  }

GROWN(frugal_config, frugal_config_init, FRUGAL_CONFIG_INIT)
GROWN(frugal_optimizer, frugal_optimizer_init, FRUGAL_OPTIMIZER_INIT)
GROWN(frugal_trainer_config, frugal_trainer_config_init, FRUGAL_TRAINER_CONFIG_INIT)

/* Its last field, the optimizer, has grown, too. */
void frugal_table_config_init(frugal_table_config *out) {
  struct {
    frugal_table_config old;
    unsigned char more[64];
  } grown = {FRUGAL_TABLE_CONFIG_INIT, {0}};
  memset(grown.more, 0xab, sizeof grown.more);
  grown.old.optimizer.struct_size = sizeof grown.old.optimizer + sizeof grown.more;
  grown.old.struct_size = sizeof grown;
  memcpy(out, &grown, sizeof grown);
}

const char *frugal_version(void) { return getenv("FRUGAL_TEST_VERSION"); }
