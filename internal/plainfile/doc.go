// Package plainfile turns a name in a folder of ours into a plain file that may be written: never
// through a symbolic link, which may lead to a file of the user's own, and never a pipe or device.
//
// Files that are replaced whole need no such care, since a rename replaces the link itself; see
// internal/atomicfile. What files need of the kernel beside package os is here too, and so the
// package is for Linux: sync_file_range is in no other kernel.
package plainfile
