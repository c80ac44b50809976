// Package hlo turns the optimized program that a PJRT plugin returns into an account of what the
// compiler made of a program: which collectives run, how often, over how many devices and with
// how many bytes; which library kernels are called; what was recomputed; what is donated.
//
// [Read] decodes the protocol buffer by hand, because only some twenty of its hundreds of fields
// matter here and because the plugins are of different ages: a field that is not known is
// skipped, and each of the encodings that XLA has used for device groups is read.
//
// Three things make the account differ from a list of the instructions:
//
//   - Loops are multiplied out. The compiler writes the trip count of a loop beside it, where it
//     knows it; where it does not, the row is counted once and marked.
//   - Only what is reached from the entry counts, and a computation that several instructions
//     call counts for all of them. A computation that is applied to elements (the sum inside an
//     all-reduce) is no part of the account.
//   - A combined collective is unpacked, one row for each tensor, so that the rows can be laid
//     beside the plan. XLA:GPU may also join the operands of an all-reduce into one array before
//     it; that array is then one row.
//
// [Module.Schedule] gives the program itself, instruction by instruction as it was scheduled, for
// who wants to know what runs beside what.
//
// The bytes of an optimized program are not reproducible: the schedule is a protocol buffer map,
// which the plugins write in another order each time. What Read makes of them is.
package hlo
