package link

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A connection between two processes carries a sequence of frames, all numbers little endian:
//
//	 0  "DWLK"
//	 4  version of the protocol, 2 bytes
//	 6  kind, 1 byte, and a zero
//	 8  epoch, 8 bytes: which run the processes belong to
//	16  length of the body, 4 bytes
//	20  body
//	    CRC-32C of all that, 4 bytes
//
// A connection begins with a hello of the one that dials and a welcome of the one that listens.
// Then come arrays, one frame each, followed by the bytes of every shard and their CRC-32C, or on a
// control connection heartbeats; bye says that there are no more. The first 20 bytes stay as they
// are in all versions, so that each side can say which version the other speaks. Version 1 had no
// heartbeats, and no processes in its hello; heartbeats of version 2 did not say who was lost.
const (
	linkMagic   = "DWLK"
	linkVersion = 3
	headerBytes = 20
	// maxBody bounds what a damaged or hostile length makes us allocate. An array's description
	// takes some hundred bytes.
	maxBody = 4096
)

type frameKind uint8

const (
	helloFrame   frameKind = 1 // control or not; from, to: ends of the link; the two processes
	welcomeFrame frameKind = 2 // "" or why the connection is refused
	arrayFrame   frameKind = 3 // tag, shape of a shard, number of shards
	byeFrame     frameKind = 4
	beatFrame    frameKind = 5 // number, and what the process does
)

// anyProcess stands in a hello for a process whose number the sender does not know.
const anyProcess = 1<<32 - 1

// castagnoli is the CRC that processors compute by themselves.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A frame is one message without the bytes of its shards.
type frame struct {
	kind     frameKind
	epoch    uint64
	control  bool        // hello: the connection carries heartbeats, not arrays
	from, to uint32      // hello: ends of the link
	self     uint32      // hello: the process that dials
	peer     uint32      // hello: the process that it wants to reach
	refusal  string      // welcome
	tag      string      // array
	shape    dtype.Shape // array: of each shard
	shards   uint32      // array
	number   uint64      // beat: counted from 1
	status   Status      // beat
	lost     uint32      // beat: the process that the sender has lost first, or anyProcess
	why      string      // beat: why it counts as lost
}

// append writes the frame.
func (f *frame) append(b []byte) []byte {
	start := len(b)
	b = append(b, linkMagic...)
	b = binary.LittleEndian.AppendUint16(b, linkVersion)
	b = append(b, byte(f.kind), 0)
	b = binary.LittleEndian.AppendUint64(b, f.epoch)
	b = append(b, 0, 0, 0, 0)
	switch f.kind {
	case helloFrame:
		way := byte(0)
		if f.control {
			way = 1
		}
		b = append(b, way)
		for _, x := range []uint32{f.from, f.to, f.self, f.peer} {
			b = binary.LittleEndian.AppendUint32(b, x)
		}
	case welcomeFrame:
		b = appendText(b, f.refusal)
	case arrayFrame:
		b = appendText(b, f.tag)
		b = appendText(b, f.shape.Type.String())
		b = append(b, byte(len(f.shape.Dims)))
		for _, d := range f.shape.Dims {
			b = binary.LittleEndian.AppendUint64(b, uint64(d))
		}
		b = binary.LittleEndian.AppendUint32(b, f.shards)
	case byeFrame:
	case beatFrame:
		b = binary.LittleEndian.AppendUint64(b, f.number)
		b = binary.LittleEndian.AppendUint64(b, uint64(f.status.Step))
		b = binary.LittleEndian.AppendUint64(b, uint64(f.status.Age))
		b = binary.LittleEndian.AppendUint64(b, uint64(f.status.Limit))
		b = appendText(b, f.status.Phase)
		b = appendText(b, f.status.Waits)
		b = binary.LittleEndian.AppendUint32(b, f.lost)
		b = appendText(b, f.why)
	}
	binary.LittleEndian.PutUint32(b[start+16:], uint32(len(b)-start-headerBytes))
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
}

// maxText bounds tags and refusals.
const maxText = 1024

func appendText(b []byte, s string) []byte {
	s = s[:min(len(s), maxText)]
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// errNotOurs is for connections of somebody else.
var errNotOurs = errors.New("the other end does not speak the protocol of Deepwell's links")

// readFrame reads one frame. io.EOF means that the connection ended before it.
func readFrame(r io.Reader) (*frame, error) {
	buf := make([]byte, headerBytes, 256)
	if _, err := io.ReadFull(r, buf); err != nil {
		return nil, err
	}
	if string(buf[:4]) != linkMagic {
		return nil, errNotOurs
	}
	if v := binary.LittleEndian.Uint16(buf[4:]); v != linkVersion {
		return nil, diag.New(diag.LinkVersion,
			"the other end speaks version %d of the protocol; this binary speaks %d", v, linkVersion).
			Try("run the same binary in every process")
	}
	n := binary.LittleEndian.Uint32(buf[16:])
	if n > maxBody {
		return nil, damaged("a frame of %d bytes", n)
	}
	buf = append(buf, make([]byte, n+4)...)
	if _, err := io.ReadFull(r, buf[headerBytes:]); err != nil {
		return nil, cutOff(err)
	}
	body, sum := buf[:headerBytes+n], binary.LittleEndian.Uint32(buf[headerBytes+n:])
	if crc32.Checksum(body, castagnoli) != sum {
		return nil, damaged("a frame has another checksum than when it was sent")
	}
	return parseFrame(body)
}

func damaged(format string, args ...any) error {
	return diag.New(diag.LinkData, "what came over the link is damaged: "+format, args...).
		Try("check the network between the hosts")
}

// cutOff tells an end inside a frame from one between frames.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// parseFrame reads a frame whose checksum is right.
func parseFrame(b []byte) (*frame, error) {
	f := &frame{kind: frameKind(b[6]), epoch: binary.LittleEndian.Uint64(b[8:])}
	r := &bodyReader{b: b[headerBytes:]}
	switch f.kind {
	case helloFrame:
		way := r.take(1)[0]
		if f.control = way == 1; way > 1 {
			return nil, damaged("no connection is of kind %d", way)
		}
		f.from, f.to, f.self, f.peer = r.u32(), r.u32(), r.u32(), r.u32()
	case welcomeFrame:
		f.refusal = r.text()
	case arrayFrame:
		f.tag = r.text()
		elem, err := dtype.Parse(r.text())
		if err != nil {
			return nil, damaged("%v", err)
		}
		f.shape = dtype.Shape{Type: elem, Dims: r.dims()}
		f.shards = r.u32()
	case byeFrame:
	case beatFrame:
		f.number = r.u64()
		f.status = Status{Step: int64(r.u64()), Age: time.Duration(r.u64()),
			Limit: time.Duration(r.u64()), Phase: r.text(), Waits: r.text()}
		f.lost, f.why = r.u32(), r.text()
	default:
		return nil, damaged("no frame has the kind %d", f.kind)
	}
	if r.short || len(r.b) > 0 {
		return nil, damaged("a frame of kind %d has another length", f.kind)
	}
	return f, nil
}

// A bodyReader takes values from the front of a body; short says that it ended too early.
type bodyReader struct {
	b     []byte
	short bool
}

func (r *bodyReader) take(n int) []byte {
	if n > len(r.b) {
		r.short = true
		r.b = nil
		return make([]byte, n)
	}
	taken := r.b[:n]
	r.b = r.b[n:]
	return taken
}

func (r *bodyReader) u32() uint32 { return binary.LittleEndian.Uint32(r.take(4)) }

func (r *bodyReader) u64() uint64 { return binary.LittleEndian.Uint64(r.take(8)) }

func (r *bodyReader) text() string {
	n := binary.LittleEndian.Uint16(r.take(2))
	return string(r.take(int(n)))
}

func (r *bodyReader) dims() []int64 {
	dims := make([]int64, r.take(1)[0])
	for i := range dims {
		dims[i] = int64(binary.LittleEndian.Uint64(r.take(8)))
	}
	return dims
}
