// Package cas turns a key into bytes that were stored under it before: a content-addressed cache
// on disk that several processes may share.
//
// A key is the hash of everything that the bytes depend on, so an entry never goes stale. Each
// file carries the hash of its own contents; a file that was damaged is found out when it is
// read, removed, and reported as missing with [ErrDamaged]. Files are written whole or not at all.
// A store removes nothing but its own files.
package cas
