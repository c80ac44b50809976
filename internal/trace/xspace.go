package trace

import (
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/wire"
)

// addXSpace adds what a profiler of XLA has recorded (tsl/profiler/protobuf/xplane.proto): a group
// for each plane of a device, in it a track for each line, such as a stream. It returns how many
// tracks of devices there were.
func (w *Writer) addXSpace(space []byte) (tracks int, err error) {
	var planes [][]byte
	keep := func(b []byte) error { planes = append(planes, b); return nil }
	if err := (wire.Into{1: keep}).Read(space); err != nil {
		return 0, badSpace(err)
	}
	for _, b := range planes {
		n, err := w.addPlane(b)
		if err != nil {
			return tracks, badSpace(err)
		}
		tracks += n
	}
	return tracks, nil
}

func badSpace(err error) error {
	return diag.New(diag.RuntimeFailed, "the plugin's profile cannot be read").Wrap(err)
}

// addPlane adds a plane, and counts its lines if it is a device's.
func (w *Writer) addPlane(b []byte) (tracks int, err error) {
	var name string
	var lines [][]byte
	names := map[int64]string{} // of events
	metadata := func(b []byte) error {
		var id int64
		var long, short string
		err := wire.Into{2: wire.Into{1: &id, 2: &long, 4: &short}}.Read(b)
		if names[id] = long; short != "" {
			names[id] = short
		}
		return err
	}
	err = wire.Into{2: &name, 4: metadata,
		3: func(b []byte) error { lines = append(lines, b); return nil }}.Read(b)
	group, device := strings.CutPrefix(name, "/device:")
	for _, line := range lines {
		if err != nil {
			break
		}
		var any bool
		any, err = w.addLine(strings.TrimPrefix(group, "/"), line, names)
		if device && any {
			tracks++
		}
	}
	return tracks, err
}

// addLine adds the events of a line, and reports whether it has any.
func (w *Writer) addLine(group string, b []byte, names map[int64]string) (any bool, err error) {
	var start int64 // nanoseconds since 1970
	var name, display string
	var events [][]byte
	err = wire.Into{2: &name, 11: &display, 3: &start,
		4: func(b []byte) error { events = append(events, b); return nil }}.Read(b)
	if display != "" {
		name = display
	}
	var track *Track
	for _, b := range events {
		if err != nil {
			break
		}
		var id, offset, length int64 // picoseconds
		if err = (wire.Into{1: &id, 2: &offset, 3: &length}).Read(b); err != nil {
			break
		}
		if track == nil {
			track = w.Track(group, name)
		}
		from := time.Unix(0, start).Add(time.Duration(offset / 1000))
		track.Add(names[id], from, from.Add(time.Duration(length/1000)))
	}
	return track != nil, err
}
