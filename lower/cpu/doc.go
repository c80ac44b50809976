// Package cpu turns operations into the StableHLO that XLA:CPU runs fast.
//
// Each kernel is a row with the reason for it; what was measured is in
// docs/decisions/0014-cpu-lowering.md. XLA:CPU fuses one output per loop, sends matrix products to
// Eigen and YNNPACK, and folds transposes into products that the libraries then refuse.
package cpu
