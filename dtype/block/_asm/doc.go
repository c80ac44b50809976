// Command asm turns the arithmetic of package block into assembly for amd64, once for AVX-512 and
// once for AVX2. It is a module of its own, so that its dependency is nobody else's.
package main
