// Package machine turns a name or the host at hand into a description that plans and compiles work
// from.
//
// A name comes from the command line: [ParseCluster] reads "64xgb200" with one catalogue of GPUs
// ([GPUModels]), and the [Target] of a cluster is all that a compiler needs to know about hardware
// it does not have. The host at hand is examined by [Probe]: processor, memory, GPUs, network
// interfaces, and the graph of how they are wired. Both use the same GPU models, so a plan made
// for a name can be compared with the machine it lands on.
//
// Everything Probe reads of Linux goes through an [io/fs.FS], so a test can pass a machine made of
// text. The description does not identify the host or the time (no host name, serial number or
// time) unless [Options] asks for it; only free memory and the negotiated PCIe speed change from
// run to run. A value that could not be determined is zero.
package machine
