//go:build !unix

package data

import (
	"errors"
	"os"
	"time"
)

func mapFile(*os.File, int) ([]byte, error) { return nil, errors.ErrUnsupported }

func unmapFile([]byte) error { return nil }

func stampOf(*os.File) (string, time.Time, error) { return "", time.Time{}, errors.ErrUnsupported }
