package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

var frames = []frame{
	{kind: helloFrame, epoch: 7, from: 1, to: 2, self: 3, peer: anyProcess},
	{kind: helloFrame, epoch: 7, control: true, from: 1, to: 2, self: 1, peer: 2},
	{kind: beatFrame, epoch: 7, number: 9, status: Status{Step: 41, Phase: "save", Waits: "disk", Age: 7, Limit: 9}},
	{kind: welcomeFrame, epoch: 7},
	{kind: welcomeFrame, epoch: 1 << 63, refusal: "no"},
	{kind: arrayFrame, tag: "0 F1.2/0", shape: dtype.Shape{Type: dtype.BF16, Dims: []int64{3, 5}}, shards: 2},
	{kind: arrayFrame, tag: "", shape: dtype.Shape{Type: dtype.F32, Dims: []int64{}}, shards: 1},
	{kind: byeFrame},
}

func TestFramesRoundTrip(t *testing.T) {
	var all []byte
	for _, f := range frames {
		all = f.append(all)
	}
	r := bytes.NewReader(all)
	for _, want := range frames {
		got, err := readFrame(r)
		if err != nil || !reflect.DeepEqual(*got, want) {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	if _, err := readFrame(r); !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %v", err)
	}
}

// A truncated frame, or one in which any bit is wrong is refused.
func TestDamagedFramesAreRefused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := frames[rapid.IntRange(0, len(frames)-1).Draw(t, "frame")].append(nil)
		if rapid.Bool().Draw(t, "truncate") {
			b = b[:rapid.IntRange(0, len(b)-1).Draw(t, "length")]
		} else {
			b[rapid.IntRange(0, len(b)-1).Draw(t, "byte")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		}
		if f, err := readFrame(bytes.NewReader(b)); err == nil {
			t.Fatalf("%x was read as %+v", b, f)
		}
	})
}

// sealed gives a body the right length and checksum, so that fuzzing gets behind them.
func sealed(kind byte, body []byte) []byte {
	b := append([]byte(linkMagic), linkVersion, 0, kind, 0)
	b = append(b, make([]byte, 8)...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = append(b, body...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// Whatever comes, reading neither panics nor allocates much, and what was read is written the same.
func FuzzFrame(f *testing.F) {
	for _, x := range frames {
		b := x.append(nil)
		f.Add(byte(x.kind), b[headerBytes:len(b)-4])
	}
	f.Fuzz(func(t *testing.T, kind byte, body []byte) {
		if _, err := readFrame(bytes.NewReader(body)); err == nil && len(body) < headerBytes+4 {
			t.Fatalf("%x was read", body)
		}
		whole := sealed(kind, body)
		got, err := readFrame(bytes.NewReader(whole))
		if err != nil {
			return
		}
		if len(got.tag) <= maxText && len(got.refusal) <= maxText && !bytes.Equal(got.append(nil), whole) {
			t.Fatalf("%x was read as %+v and written as %x", whole, got, got.append(nil))
		}
	})
}

func TestAnotherVersionIsNamed(t *testing.T) {
	b := frames[0].append(nil)
	b[4] = 9
	_, err := readFrame(bytes.NewReader(b))
	if !errors.Is(err, diag.LinkVersion) {
		t.Errorf("version 9: %v", err)
	}
}
