// Package atomicfile turns bytes into a file that is either whole or not there: it writes beside
// the target, syncs and renames, so that a kill at any moment leaves the old file or the new one.
package atomicfile
