package schedule

import (
	"reflect"
	"testing"
)

// After some microbatches for each rank, more of them hold no more.
func TestEnoughMicrobatches(t *testing.T) {
	for _, name := range []string{"1f1b", "interleaved", "zb-h1", "zb-v"} {
		for _, ranks := range []int{2, 3, 4, 7, 8, 16} {
			for _, virtual := range []int{1, 2, 3, 5} {
				fits := virtual == 1
				switch name {
				case "interleaved":
					fits = virtual > 1
				case "zb-v":
					fits = virtual == 2
				}
				if !fits {
					continue
				}
				var want *Walk
				for _, micros := range []int{enough * ranks, (enough + 3) * ranks, enough*ranks + 1} {
					if name == "interleaved" && micros%ranks != 0 {
						continue
					}
					s, err := New(name, Shape{Ranks: ranks, Virtual: virtual, Micros: micros})
					if err != nil {
						t.Fatal(err)
					}
					got := s.Walk()
					if want == nil {
						want = got
					}
					if !reflect.DeepEqual(got, want) {
						t.Errorf("%s of %d ranks, %d turns: %d microbatches hold other things than fewer", name,
							ranks, virtual, micros)
					}
				}
			}
		}
	}
}
