package strictjson

import "testing"

func TestDecode(t *testing.T) {
	type doc struct {
		A int `json:"a"`
	}
	for text, well := range map[string]bool{
		`{"a": 1}`: true, " {\"a\": 1}\n": true, `{}`: true,
		`{"a": 1} {}`: false, `{"a": 1}]`: false,
		`{"b": 1}`: false, `{"a": "1"}`: false, ``: false, `{"a": 1`: false,
	} {
		if err := Decode([]byte(text), &doc{}); (err == nil) != well {
			t.Errorf("%q: %v", text, err)
		}
	}
}
