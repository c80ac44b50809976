// Package hostlist turns a list of hosts as Slurm writes it, such as node[001-064,070]:7000, into
// the addresses of a run's processes.
package hostlist
