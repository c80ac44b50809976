// Package launch turns a run and its plan's hosts into processes: started here, or written as what
// a cluster's scheduler takes, a batch script for Slurm or a JobSet for Kubernetes.
package launch
