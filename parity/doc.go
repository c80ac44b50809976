// Package parity turns a recipe and several precisions into paired curves and a verdict: by how
// much the loss is worse than in BF16, and how sure that is.
//
// Two runs are a pair if they have the same seed and the same rows in the same order. The gap of a
// pair is the difference of their mean losses over the last steps, in percent of BF16's. A pair
// alone says little: small runs at a high rate drift apart whatever the precision, so BF16 always
// runs a second time with weights that were changed by one part in 100,000, and the gap between
// those two is the noise that every other gap is read against. What the noise or the spread of the
// gaps does not allow to decide is called not resolved, which is no pass.
//
// Pairs either start from scratch, one seed each, or branch off one trained state, each with other
// rows, while the rate falls to zero. The gaps of branches spread 15 to 20 times less
// (docs/precision.md), so that they resolve smaller ones; they see the error of the forward pass
// and of gradients, not a slow drift.
package parity
