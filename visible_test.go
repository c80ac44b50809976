package deepwell

import (
	"fmt"
	"testing"

	"github.com/deepwell/deepwell/machine"
)

// CUDA counts the GPUs that it shows, and ends at the first that is not there.
func TestVisibleGPUs(t *testing.T) {
	all := []machine.GPU{{Index: 0, UUID: "GPU-aa01"}, {Index: 1, UUID: "GPU-ab02"}, {Index: 2, UUID: "GPU-b03"}}
	for list, want := range map[string]string{"": "", "0": "0", "2,0": "2 0", "1,-1,0": "1", "7,1": "",
		"GPU-ab": "1", "GPU-b, 0": "2 0", "NoDevFiles": ""} {
		got := ""
		for i, g := range visibleGPUs(all, list) {
			if i > 0 {
				got += " "
			}
			got += fmt.Sprint(g.Index)
		}
		if got != want {
			t.Errorf("%q shows %q, not %q", list, got, want)
		}
	}
}
