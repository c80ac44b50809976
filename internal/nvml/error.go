package nvml

import (
	"errors"
	"fmt"
)

// ErrNoLibrary says that there is no NVML to load: the machine has no NVIDIA driver, or a
// container was not given it.
var ErrNoLibrary = errors.New("nvml: the library is not there")

// An Error is an answer of NVML other than success.
type Error struct {
	Call string // the function that answered
	Code int    // its nvmlReturn_t
	Text string // what nvmlErrorString says of the code
}

// Error gives the answer with the function and the code, to be looked up in NVIDIA's manual.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s (NVML code %d)", e.Call, e.Text, e.Code)
}

// Codes of nvmlReturn_t that callers tell apart.
const (
	CodeNotLoaded = 9  // NVML_ERROR_DRIVER_NOT_LOADED: the kernel module is not there
	CodeMismatch  = 18 // NVML_ERROR_LIB_RM_VERSION_MISMATCH: the library is newer than the module
)

const (
	codeInvalid      = 2
	codeNotSupported = 3
	codeNotAllowed   = 4
	codeNotFound     = 6
	codeNoFunction   = 13
	codeArgVersion   = 25
	codeDeprecated   = 26
)

// unknown reports whether a code means only that there is nothing to know: the GPU, the driver
// or the caller's rights do not allow the question.
func unknown(code int) bool {
	switch code {
	case codeInvalid, codeNotSupported, codeNotAllowed, codeNotFound, codeNoFunction,
		codeArgVersion, codeDeprecated:
		return true
	}
	return false
}
