package machine

import (
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// oldest is the oldest driver that the engine needsDriver runs on. CUDA 13 asks for release 580
// (580.65.06 came with CUDA 13.0), and every later 13.x runs on it by NVIDIA's minor-version
// compatibility (the data center driver's manual, "Supported Drivers and CUDA Toolkit Versions").
// Newer releases keep running older CUDA, so there is no upper bound. None of this has been run by
// us: the pinned plugin was loaded and compiled with, but never on a GPU.
const needsDriver, oldest = "cuda13", "580.65.06"

// CheckDriver says whether the installed NVIDIA driver can run an engine, and what to do if not. An
// engine that needs no driver accepts any.
func CheckDriver(engine, version string) error {
	if strings.TrimSuffix(engine, "-run") != needsDriver {
		return nil
	}
	branch, _, _ := strings.Cut(oldest, ".")
	got, ok := versionNumbers(version)
	least, _ := versionNumbers(oldest)
	switch {
	case !ok:
		return diag.New(diag.EngineLoad, "no NVIDIA driver is known to be installed").
			Because("%s needs driver %s or newer", needsDriver, oldest).
			Try("install the NVIDIA driver, release %s or newer, and start again", branch)
	case slices.Compare(got, least) < 0:
		return diag.New(diag.EngineLoad, "driver %s is too old for %s: update to >= %s", version,
			needsDriver, oldest).
			Try("update the NVIDIA driver to release %s or newer and reboot", branch)
	}
	return nil
}

// versionNumbers reads a version; zeros at its end, which may be missing, are left out.
func versionNumbers(version string) ([]int, bool) {
	var numbers []int
	for part := range strings.SplitSeq(strings.TrimSpace(version), ".") {
		n, err := strconv.Atoi(part)
		if err != nil || n < 0 {
			return nil, false
		}
		numbers = append(numbers, n)
	}
	for n := len(numbers); n > 0 && numbers[n-1] == 0; n-- {
		numbers = numbers[:n-1]
	}
	return numbers, true
}
