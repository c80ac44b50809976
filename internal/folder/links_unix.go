//go:build unix

package folder

import (
	"io/fs"
	"syscall"
)

// links counts the names that a file has.
func links(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // 16 bits on Darwin
	}
	return 1
}
