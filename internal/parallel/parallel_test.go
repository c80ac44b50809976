package parallel

import (
	"fmt"
	"testing"
)

func TestEachGivesTheFirstError(t *testing.T) {
	for range 20 {
		err := Each(8, 100, func() func(int) error {
			return func(i int) error {
				if i >= 3 {
					return fmt.Errorf("job %d", i)
				}
				return nil
			}
		})
		if err == nil || err.Error() != "job 3" {
			t.Fatal(err)
		}
	}
	if err := Each(0, 1, func() func(int) error {
		return func(i int) error { return fmt.Errorf("job %d", i) }
	}); err == nil {
		t.Error("no worker, and no error")
	}
	if err := Each(8, 0, nil); err != nil {
		t.Error(err)
	}
}
