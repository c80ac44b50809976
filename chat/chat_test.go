package chat

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// show writes a document with what is not learned in brackets.
func show(d Document) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ", d.Kind)
	if d.Chat == nil {
		fmt.Fprintf(&b, "[%s]%s", d.Text[:d.Prompt], d.Text[d.Prompt:])
	}
	for _, m := range d.Chat {
		text := m.Role + "=" + m.Content
		if m.Calls {
			text += "+calls"
		}
		if !m.Learned {
			text = "[" + text + "]"
		}
		b.WriteString(text)
	}
	if d.Tools != nil {
		fmt.Fprintf(&b, " tools=%s", d.Tools)
	}
	return b.String()
}

func TestRowsAreKnownByTheirColumns(t *testing.T) {
	for _, tt := range []struct {
		line    string
		columns Columns
		want    string
	}{
		{`{"text":"a","id":3}`, nil, "text: []a"},
		{`{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"text":"x"}`, nil,
			"messages: [user=a]assistant=b"},
		{`{"messages":null,"text":"x"}`, nil, "text: []x"},
		{`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"z":1,"a":2}]}],"tools":[{"z":1,"a":2}]}`, nil,
			`messages: assistant=+calls tools=[{"z":1,"a":2}]`},
		{`{"messages":[{"role":"user","content":"a"}],"tools":[]}`, nil, `messages: [user=a]`},
		{`{"prompt":"2+2=","completion":" 4"}`, nil, "prompt/completion: [2+2=] 4"},
		{`{"prompt":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],` +
			`"completion":[{"role":"assistant","content":"d"}]}`, nil,
			"prompt/completion: [user=a][assistant=b][user=c]assistant=d"},
		{`{"instruction":"do","input":"","output":"done"}`, nil, "Alpaca: [user=do]assistant=done"},
		{`{"instruction":"do","input":"it","output":"done","system":"be","history":[["q","r"]]}`, nil,
			"Alpaca: [system=be][user=q]assistant=r[user=do\n\nit]assistant=done"},
		{`{"instruction":"do","output":"done","text":"all"}`, nil, "text: []all"},
		{`{"instruction":"do","output":"done","text":"all"}`, Columns{"instruction": "instruction"},
			"Alpaca: [user=do]assistant=done"},
		{`{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"}],"system":"s"}`, nil,
			"ShareGPT: [system=s][user=a]assistant=b"},
		{`{"conversations":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}`, nil,
			"ShareGPT: [user=a]assistant=b"},
		{`{"question":"q","answer":"a"}`, Columns{"prompt": "question", "completion": "answer"}, "prompt/completion: [q]a"},
		{`{"question":"q","answer":"a"}`, Columns{"instruction": "question", "output": "answer"}, "Alpaca: [user=q]assistant=a"},
		{`{"prompt":"q","chosen":"a","rejected":"b"}`, Columns{"completion": "chosen"}, "prompt/completion: [q]a"},
		{`{"conversation":[{"role":"user","content":"a"}]}`, Columns{"messages": "conversation"}, "messages: [user=a]"},
	} {
		row, err := ParseRow([]byte(tt.line))
		if err != nil {
			t.Fatal(err)
		}
		d, err := tt.columns.Read(row)
		if got := show(d); err != nil || got != tt.want {
			t.Errorf("%s: %q, %v; want %q", tt.line, got, err, tt.want)
		}
	}
}

func TestOtherRowsAreRefused(t *testing.T) {
	for _, tt := range []struct {
		line    string
		columns Columns
		want    string
	}{
		{`{"question":"q","answer":"a"}`, nil, `columns = {instruction = "question", output = "answer"}`},
		{`{"question":"q","answer":"a"}`, nil, `it has "answer", "question"; known are text, messages, ShareGPT (conversations)`},
		{`{"prompt":"q","response":"a"}`, nil, `columns = {completion = "…"}`},
		{`{"prompt":"q","chosen":"a","rejected":"b"}`, nil, `columns = {completion = "chosen"}`},
		{`{"body":"x"}`, nil, `columns = {text = "body"}`},
		{`{"body":"x","id":1,"url":""}`, nil, `columns = {text = "…"}`},
		{`{}`, nil, "no columns"},
		{`{"prompt":"x","completion":null}`, nil, "is not a string or a list"},
		{`{"prompt":"x","completion":[]}`, nil, `one of "prompt" and "completion" is text`},
		{`{"prompt":[{"role":"user","content":"a"}],"completion":[]}`, nil, "the list is empty"},
		{`{"prompt":5,"completion":"x"}`, nil, `"prompt" is not a string`},
		{`{"instruction":"x","output":{}}`, nil, `"output" is not a string`},
		{`{"instruction":"x","output":"y","history":"z"}`, nil, "not a list of pairs"},
		{`{"conversations":[{"from":"bot","value":"x"}]}`, nil, `a message is from "bot"`},
		{`{"questions":"q","answer":"a"}`, Columns{"prompt": "question", "completion": "answer"}, `did you mean columns = {prompt = "questions"}`},
		{`{"question":null,"answer":"a"}`, Columns{"prompt": "question", "completion": "answer"}, `"question", the prompt of prompt/completion, is null`},
		{"{\"text\":\"caf\xe9\"}", nil, "byte 13 of it is 0xE9"},
	} {
		row, err := ParseRow([]byte(tt.line))
		if err == nil {
			_, err = tt.columns.Read(row)
		}
		if !errors.Is(err, diag.DataFormat) || !strings.Contains(diag.From(err).Format(), tt.want) ||
			diag.From(err).Fix == "" {
			t.Errorf("%s: %v; want %s", tt.line, err, tt.want)
		}
	}
	for want, columns := range map[string]Columns{
		`did you mean "prompt"?`: {"promt": "x"}, "is empty": {"text": ""},
		"of two kinds, text and Alpaca": {"text": "x", "output": "y"},
	} {
		if err := columns.Check(); !errors.Is(err, diag.BadInput) || !strings.Contains(diag.From(err).Format(), want) {
			t.Errorf("%v: %v; want %s", columns, err, want)
		}
	}
	if err := (Columns{"text": "x"}).Check(); err != nil {
		t.Error(err)
	}
}

func FuzzRow(f *testing.F) {
	f.Add(`{"text":"a"}`)
	f.Add(`{"prompt":[{"role":"user","content":[{"text":"a"}]}],"completion":[{"role":"assistant","tool_calls":[{}]}]}`)
	f.Add(`{"conversations":[{"from":"human","value":"a"}],"tools":"[]"}`)
	f.Add(`{"instruction":"","output":"","history":[["",""]]}`)
	f.Fuzz(func(t *testing.T, line string) {
		row, err := ParseRow([]byte(line))
		if err == nil {
			var d Document
			if d, err = Columns(nil).Read(row); err == nil && d.Prompt > len(d.Text) {
				t.Fatalf("%q: the prompt is longer than the text", line)
			}
		}
		if err != nil && diag.From(err).Code != diag.DataFormat {
			t.Fatalf("an error without its code: %v", err)
		}
	})
}
