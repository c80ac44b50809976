// Package flock turns the name of a lock file into a lock that one process holds at a time.
//
// The lock is an flock, so the kernel drops it when the process dies, however it dies. The file
// stays: removing it would let two processes lock two files of the same name. It has the number of
// the process and the name of its host, for messages only.
package flock
