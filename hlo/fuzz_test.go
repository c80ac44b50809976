package hlo

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// FuzzRead feeds arbitrary bytes to both formats and calls everything there is. Run it with
// -fuzzminimizetime=1x: the fixtures are so long that go test otherwise spends its time on
// shortening them, which shows as 0 executions a second.
func FuzzRead(f *testing.F) {
	for _, name := range fixtureNames(f) {
		code, err := os.ReadFile(filepath.Join("testdata", name+".hlo"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(true, code)
	}
	s := array(f32, 8)
	param := inst(1, "parameter", s)
	trip := `{"known_trip_count":{"n":"9"}}`
	f.Add(false, []byte(module(comp(1, "entry", 2, param, loop(2, 2, 3, trip)),
		comp(2, "body", 2, param, inst(2, "all-gather-start", tupleOf(s, s), 1).Bytes(92, msg(nil).
			Int(1, 4).Int(2, 8).Packed(3, 4, 8).Packed(4, 1, 0))), comp(3, "condition", 1, param))))
	f.Add(false, []byte(nil))
	f.Fuzz(func(t *testing.T, config bool, code []byte) {
		format := "hlo"
		if config {
			format = "hlo_with_config"
		}
		m, err := Read(format, code)
		if err != nil {
			if m != nil || err.Error() == "" {
				t.Error("an error comes with a module or without a text")
			}
			return
		}
		_ = summary(m)
		if c, err := m.Schedule(); (c == nil) == (err == nil) {
			t.Error("a schedule comes with an error, or neither comes")
		}
		for _, c := range m.Collectives() {
			if c.Count < 0 || c.OperandBytes < 0 || c.ResultBytes < 0 || c.Group.Size < 0 {
				t.Errorf("negative figure in %+v", c)
			}
			if _, err := json.Marshal(c); err != nil {
				t.Error(err)
			}
		}
		for _, c := range m.CustomCalls() {
			if c.Count < 0 || c.Workspace < 0 || c.ResultBytes < 0 {
				t.Errorf("negative figure in %+v", c)
			}
		}
		for _, a := range m.Aliases {
			_, _ = m.Results[a.Result], m.Params[a.Param]
		}
	})
}
