//go:build !linux

package ckpt

import "os"

// flush leaves the writing to the sync at the end.
func flush(*os.File, int64, int64) {}
