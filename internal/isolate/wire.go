package isolate

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/program"
)

// wireVersion is the version of the protocol: a program may name a child of another release.
const wireVersion = 1

// A greeting is the first request: what to load.
type greeting struct {
	Version      int    `json:"v"`
	Engines      string `json:"engines"`
	Cluster      string `json:"cluster"` // NxCARD
	Cache        string `json:"cache,omitempty"`
	WithoutCuDNN bool   `json:"without_cudnn,omitempty"`
	Ahead        bool   `json:"ahead,omitempty"`
}

// An order is a request to compile a module. Its text follows the line.
type order struct {
	Stage program.Module  `json:"stage"`
	Flags map[string]flag `json:"flags,omitempty"` // the module's
	Bytes int64           `json:"bytes"`           // of the text
}

// A flag is the value of a compile option with its type: XLA tells 1 from 1.0 and from "1".
type flag struct {
	Bool   *bool   `json:"bool,omitempty"`
	Int    *int64  `json:"int,omitempty"`
	Float  *uint64 `json:"float,omitempty"` // its bits: JSON has no infinity
	String *string `json:"string,omitempty"`
}

// An answer ends a request.
type answer struct {
	Ready  bool           `json:"ready,omitempty"`
	Report *engine.Report `json:"report,omitempty"`
	Error  *diag.Error    `json:"error,omitempty"`
}

// newOrder describes a module without its text; nothing has been sent when it fails.
func newOrder(m *program.Module) (order, error) {
	o := order{Stage: *m, Bytes: int64(len(m.Text)), Flags: map[string]flag{}}
	o.Stage.Flags = nil
	for name, value := range m.Flags {
		f, err := wrap(name, value)
		if err != nil {
			return o, err
		}
		o.Flags[name] = f
	}
	return o, nil
}

// send writes a request and the text that follows it, which is not copied.
func send(w *os.File, request any, text string) error {
	if err := writeLine(w, request); err != nil {
		return err
	}
	_, err := w.WriteString(text)
	return err
}

// receive reads what send writes.
func receive(in *bufio.Reader) (*program.Module, error) {
	var o order
	if err := readLine(in, &o); err != nil {
		return nil, err
	}
	var text strings.Builder
	if o.Bytes < 0 {
		return nil, fmt.Errorf("a text of %d bytes", o.Bytes)
	}
	text.Grow(int(o.Bytes))
	if _, err := io.CopyN(&text, in, o.Bytes); err != nil {
		return nil, err
	}
	m := &o.Stage
	m.Text = text.String()
	if len(o.Flags) > 0 {
		m.Flags = map[string]any{}
	}
	for name, f := range o.Flags {
		m.Flags[name] = f.value()
	}
	return m, nil
}

func wrap(name string, value any) (f flag, err error) {
	switch v := value.(type) {
	case bool:
		f.Bool = &v
	case int:
		wide := int64(v)
		f.Int = &wide
	case int64:
		f.Int = &v
	case float64:
		bits := math.Float64bits(v)
		f.Float = &bits
	case string:
		f.String = &v
	default:
		err = diag.New(diag.CompileOption, "option %s has a value of type %T", name,
			value).Try("give a bool, an int, a float64 or a string")
	}
	return f, err
}

func (f flag) value() any {
	switch {
	case f.Bool != nil:
		return *f.Bool
	case f.Int != nil:
		return *f.Int
	case f.Float != nil:
		return math.Float64frombits(*f.Float)
	case f.String != nil:
		return *f.String
	}
	return nil // no option takes it
}

func writeLine(w io.Writer, value any) error {
	line, err := json.Marshal(value)
	if err != nil {
		return err
	}
	_, err = w.Write(append(line, '\n'))
	return err
}

func readLine(in *bufio.Reader, into any) error {
	line, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, into)
}

// listen reads lines up to the answer and passes the events among them on.
func listen(in *bufio.Reader, events event.Sink) (*answer, error) {
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil, err
		}
		a := &answer{}
		if err := json.Unmarshal(line, a); err != nil {
			return nil, err
		}
		if a.Ready || a.Report != nil || a.Error != nil {
			return a, nil
		}
		for record, err := range event.Read(bytes.NewReader(line)) {
			if err != nil {
				return nil, err
			}
			events.Emit(record.Event)
		}
	}
}
