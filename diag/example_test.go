package diag_test

import (
	"errors"
	"fmt"

	"github.com/deepwell/deepwell/diag"
)

func connect() error {
	err := diag.New(diag.LinkLost, "the link to process 3 is gone").Try("start the run again")
	return fmt.Errorf("step 120: %w", err)
}

// A code is a target of errors.Is, also where the error was wrapped.
func Example() {
	err := connect()
	if errors.Is(err, diag.LinkLost) {
		fmt.Println("reconnect:", diag.From(err).Fix)
	}
	fmt.Println(errors.Is(err, diag.LinkStalled))
	// Output:
	// reconnect: start the run again
	// false
}

func ExampleError_Format() {
	err := diag.New(diag.EngineMissing, "engine %q is not installed", "cpu").
		At("~/.local/share/deepwell/engines").
		Try("deepwell engine install cpu")
	fmt.Print(err.Format())
	// Output:
	// DW2002 engine "cpu" is not installed
	//   where  ~/.local/share/deepwell/engines
	//   fix    deepwell engine install cpu
}
