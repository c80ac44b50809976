// Package launch turns a run and its plan's hosts into what a cluster's scheduler takes: a batch
// script for Slurm, a JobSet for Kubernetes.
package launch
