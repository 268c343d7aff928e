/* The public header first and alone, so that it has to bring along whatever it needs. Compiled as
 * every C from C99 on with all warnings as errors. */
#include "frugal.h"

/* The initializers are constant expressions and usable for objects of static storage. */
static const frugal_config kConfig = FRUGAL_CONFIG_INIT;
static const frugal_optimizer kOptimizer = FRUGAL_OPTIMIZER_INIT;
static const frugal_table_config kTableConfig = FRUGAL_TABLE_CONFIG_INIT;
static const frugal_trainer_config kTrainerConfig = FRUGAL_TRAINER_CONFIG_INIT;
static const frugal_op kOp = FRUGAL_OP_INIT;

size_t frugal_header_sizes(void);

size_t frugal_header_sizes(void) {
  return kConfig.struct_size + kOptimizer.struct_size + kTableConfig.struct_size +
         kTrainerConfig.struct_size + kOp.struct_size;
}
