// Package room turns a host's files and disks into what this process may still take of them: bytes
// of memory, by what bounds them, and bytes of a disk.
//
// Memory is read through an [io/fs.FS], so a test can hand it a host made of text.
package room
