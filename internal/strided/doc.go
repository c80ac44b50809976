// Package strided turns a box of one dense array into a box of another, at the speed of memory: the
// dimensions may stand in another order, and either box may be a part of a larger array.
package strided
