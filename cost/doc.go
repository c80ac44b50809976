// Package cost turns the graph of a program into its bill: the products, attention, streams of
// bytes, quantizations and collectives that one device is asked for, and the buffers that it keeps.
//
// [Of] lists the items of any graph. A [Book] has the bills of a model for a search over plans: it
// builds the graph of a loss as training does (Config.Graph, the policy's marks, spmd.Shard,
// ir.Grad) once for each way of sharding, and gives the [Bill] of a microbatch for any number of
// rows and devices from it. What an operation is worth stands in its row of ir's table of kinds; a
// bill has no prices.
package cost
