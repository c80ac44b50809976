// Package machine turns a name or the host at hand into a description that plans and compiles
// work from.
//
// A name comes from the command line: [ParseCluster] reads "64xgb200" with the help of one
// catalogue of cards ([Cards]), and the [Target] of a cluster is all that a compiler must be told
// about hardware it does not have. The host at hand is examined by [Probe]: processor, memory,
// GPUs, network cards, and the graph of what is wired to what. Both speak of the same cards, so a
// plan made for a name can be held against the machine it lands on.
//
// Everything Probe reads of Linux goes through an [io/fs.FS], so a test can hand it a machine made
// of text. The description does not tell which host it was or when (no host name, no serial number,
// no time) unless [Options] asks for it; what changes from run to run is only free memory and the
// negotiated PCIe speed. A value that could not be found out is zero.
package machine
