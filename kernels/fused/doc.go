// Package fused turns shapes into kernels of our own for Blackwell, in the words of package triton.
//
// XLA and cuDNN have fast GEMMs and attention. What they lack is here: kernels that quantize what
// they compute, both ways in one read, in the layouts that tensor cores take. Each is one file; its
// first comment says what it computes, and its results are bytes that dtype/block gives as well.
//
// None of them has run on a GPU. Their texts are run by triton/run, and compiled for each target:
// table.csv has what became of them.
package fused
