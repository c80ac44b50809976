package pt2

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"io/fs"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// The records of a zip file, by signature and fixed size. Numbers are little-endian.
const (
	localSign, localSize        = "PK\x03\x04", 30
	centralSign, centralSize    = "PK\x01\x02", 46
	endSign, endSize            = "PK\x05\x06", 22
	end64Sign, end64Size        = "PK\x06\x06", 56
	locatorSign, locatorSize    = "PK\x06\x07", 20
	flagEncrypted, flagDeferred = 1, 1 << 3 // deferred: sizes and CRC follow the data
	// symlink is the type of a Unix file in the upper half of the external attributes.
	typeMask, symlink = 0o170000, 0o120000
)

// maxDirectory bounds the directory, which is read at once: an entry has about 80 bytes, and a
// model some thousands of entries.
const maxDirectory = 100_000_000

// An entry is one file of an archive, stored as it is.
type entry struct {
	name     string
	at, size int64 // of the data
	crc      uint32
	header   int64 // where the local header begins
	flags    uint16
}

// A zipFile is what the central directory lists, by name.
type zipFile struct {
	r       io.ReaderAt
	size    int64
	entries map[string]entry
}

var little = binary.LittleEndian

// openZip reads the directory of an archive, and checks that entries are stored, do not overlap,
// have different names that stay within a folder, and agree with the headers before their data.
func openZip(r io.ReaderAt, size int64) (*zipFile, error) {
	z := &zipFile{r: r, size: size, entries: map[string]entry{}}
	begin, length, count, err := z.end()
	if err != nil {
		return nil, err
	}
	directory, err := z.read(begin, length)
	if err != nil {
		return nil, err
	}
	list := make([]entry, 0, min(count, length/centralSize))
	for len(directory) > 0 {
		e, n, err := central(directory)
		if err != nil {
			return nil, err
		}
		list = append(list, e)
		directory = directory[n:]
	}
	if int64(len(list)) != count {
		return nil, damaged("the directory has %d entries, not %d", len(list), count)
	}
	lists.Sort(list, func(a, b entry) int { return cmp.Compare(a.header, b.header) })
	at := int64(0)
	for i := range list {
		e := &list[i]
		if _, twice := z.entries[e.name]; twice {
			return nil, damaged("the archive holds %s twice", human.Quote(e.name))
		}
		if e.header < at {
			return nil, damaged("entry %s overlaps another", human.Quote(e.name))
		}
		if err := z.local(e, begin); err != nil {
			return nil, err
		}
		at = e.at + e.size
		z.entries[e.name] = *e
	}
	return z, nil
}

// read gives a part of the file, whose range was checked.
func (z *zipFile) read(at, n int64) ([]byte, error) {
	p := make([]byte, n)
	return p, z.fill(p, at)
}

func (z *zipFile) fill(p []byte, at int64) error {
	n, err := z.r.ReadAt(p, at)
	switch {
	case n == len(p):
		return nil
	case errors.Is(err, io.EOF):
		return diag.New(codeFile, "the file became shorter while it was open").
			Try("let no other program write the file, and open it again")
	case errors.Is(err, fs.ErrClosed):
		return diag.New(codeClosed, "a tensor was used after its archive was closed").Wrap(err).
			Try("close the archive when no tensor of it is needed any more")
	}
	return diag.New(codeFile, "the archive cannot be read").Wrap(err)
}

// end reads the records at the end of the file: where the directory begins, its bytes and entries.
// torch writes both the classic record and the one of zip64; the latter counts.
func (z *zipFile) end() (begin, length, count int64, err error) {
	if z.size < endSize {
		return 0, 0, 0, damaged("the file has %d bytes, too few for an archive", z.size)
	}
	tail, err := z.read(max(0, z.size-endSize-locatorSize), min(z.size, endSize+locatorSize))
	if err != nil {
		return 0, 0, 0, err
	}
	end := tail[len(tail)-endSize:]
	if string(end[:4]) != endSign || little.Uint16(end[20:]) != 0 {
		return 0, 0, 0, z.mistaken()
	}
	limit := z.size - endSize
	count, length = int64(little.Uint16(end[10:])), int64(little.Uint32(end[12:]))
	begin = int64(little.Uint32(end[16:]))
	disks := little.Uint32(end[4:]) != 0 || little.Uint16(end[8:]) != little.Uint16(end[10:])
	if string(tail[:4]) == locatorSign && len(tail) == endSize+locatorSize {
		at := int64(little.Uint64(tail[8:]))
		if limit -= locatorSize; at < 0 || at != limit-end64Size {
			return 0, 0, 0, damaged("the record of zip64 is not before its locator")
		}
		end64, err := z.read(at, end64Size)
		if err != nil {
			return 0, 0, 0, err
		}
		classic := [3]int64{count, length, begin}
		count, length = int64(little.Uint64(end64[32:])), int64(little.Uint64(end64[40:]))
		begin = int64(little.Uint64(end64[48:]))
		disks = disks || little.Uint64(end64[16:]) != 0 || little.Uint64(end64[24:]) != uint64(count)
		if string(end64[:4]) != end64Sign || classic != saturate(count, length, begin) {
			return 0, 0, 0, damaged("the records at the end of the archive contradict each other")
		}
		limit = at
	}
	switch {
	case disks:
		return 0, 0, 0, damaged("the archive is one of several parts")
	case begin < 0 || length < 0 || begin > limit || length != limit-begin:
		return 0, 0, 0, damaged("the directory is not where the end of the archive says")
	case length > maxDirectory:
		return 0, 0, 0, damaged("the directory has %d bytes; at most %d are read", length, maxDirectory)
	}
	return begin, length, count, nil
}

// saturate is what the classic record says where zip64 has these numbers.
func saturate(count, length, begin int64) [3]int64 {
	return [3]int64{min(count, 1<<16-1), min(length, 1<<32-1), min(begin, 1<<32-1)}
}

// mistaken says what a file that is no archive may be.
func (z *zipFile) mistaken() *diag.Error {
	start, err := z.read(0, min(z.size, 32))
	if err != nil {
		return diag.From(err)
	}
	for _, known := range []struct{ magic, what, fix string }{
		{"version https://git-lfs", "this is a Git LFS pointer, not the archive", "git lfs pull"},
		{"\x80\x02", "this is a pickle, which can run code and is not read", saveAgain},
		{"<", "this is a web page", "fetch the file again: the server sent a page instead"},
		{"PK", "the archive has no end: it is truncated, or something follows it",
			"the download or copy did not finish: fetch the file again"},
	} {
		if bytes.HasPrefix(start, []byte(known.magic)) {
			return diag.New(codeFormat, "%s", known.what).Try("%s", known.fix)
		}
	}
	return damaged("this is not a zip archive")
}

// central reads the first entry of the directory, and the bytes that it takes.
func central(b []byte) (e entry, n int, err error) {
	if len(b) < centralSize || string(b[:4]) != centralSign {
		return e, 0, damaged("the directory is not well formed")
	}
	name, extra := int(little.Uint16(b[28:])), int(little.Uint16(b[30:]))
	if n = centralSize + name + extra + int(little.Uint16(b[32:])); n > len(b) {
		return e, 0, damaged("the directory ends within an entry")
	}
	e = entry{name: string(b[centralSize : centralSize+name]), flags: little.Uint16(b[8:]),
		crc: little.Uint32(b[16:])}
	packed, size := uint64(little.Uint32(b[20:])), uint64(little.Uint32(b[24:]))
	at := uint64(little.Uint32(b[42:]))
	if err := checkEntry(e.name); err != nil {
		return e, 0, err
	}
	if !zip64(b[centralSize+name:centralSize+name+extra], &size, &packed, &at) {
		return e, 0, damaged("entry %s lacks its size of 64 bits", human.Quote(e.name))
	}
	switch method := little.Uint16(b[10:]); {
	case e.flags&flagEncrypted != 0:
		return e, 0, damaged("entry %s is encrypted", human.Quote(e.name))
	case method != 0 || packed != size:
		return e, 0, damaged("entry %s is compressed", human.Quote(e.name)).
			Because("torch.export.save stores entries as they are").Try("%s", saveAgain)
	case little.Uint32(b[38:])>>16&typeMask == symlink:
		return e, 0, damaged("entry %s is a symbolic link", human.Quote(e.name))
	case size > 1<<62 || at > 1<<62:
		return e, 0, damaged("entry %s lies outside the file", human.Quote(e.name))
	}
	e.size, e.header = int64(size), int64(at)
	return e, n, nil
}

// zip64 takes the numbers that do not fit into 32 bits from an entry's extra field.
func zip64(extra []byte, numbers ...*uint64) bool {
	var field []byte
	for len(extra) >= 4 {
		n := int(little.Uint16(extra[2:]))
		if n > len(extra)-4 {
			break
		}
		if little.Uint16(extra) == 1 {
			field = extra[4 : 4+n]
		}
		extra = extra[4+n:]
	}
	for _, v := range numbers {
		if *v != 1<<32-1 {
			continue
		}
		if len(field) < 8 {
			return false
		}
		*v, field = little.Uint64(field), field[8:]
	}
	return true
}

// maxName bounds names, which are printed in messages.
const maxName = 4096

// checkEntry refuses names that lead out of a folder, though nothing is ever unpacked, and names
// that could forge a message.
func checkEntry(name string) error {
	if len(name) > maxName || !utf8.ValidString(name) || !fs.ValidPath(name) || name == "." ||
		strings.ContainsRune(name, '\\') || strings.ContainsFunc(name, unicode.IsControl) {
		return damaged("the archive holds an entry called %s", human.Quote(name))
	}
	return nil
}

// local compares an entry with the header before its data, which ends before limit.
func (z *zipFile) local(e *entry, limit int64) error {
	lies := damaged("entry %s lies outside the file", human.Quote(e.name))
	if e.header > limit-localSize-int64(len(e.name)) {
		return lies
	}
	b, err := z.read(e.header, localSize+int64(len(e.name)))
	if err != nil {
		return err
	}
	name, extra := int64(little.Uint16(b[26:])), int64(little.Uint16(b[28:]))
	e.at = e.header + localSize + name + extra
	if e.at > limit || e.size > limit-e.at {
		return lies
	}
	// Sizes stand behind the data if they are deferred, and in the extra field if they are large.
	agree := func(at int, want int64) bool {
		v := int64(little.Uint32(b[at:]))
		return v == min(want, 1<<32-1) || v == 0 && e.flags&flagDeferred != 0
	}
	if string(b[:4]) != localSign || string(b[localSize:]) != e.name || name != int64(len(e.name)) ||
		little.Uint16(b[6:]) != e.flags || little.Uint16(b[8:]) != 0 || !agree(14, int64(e.crc)) ||
		!agree(18, e.size) || !agree(22, e.size) {
		return damaged("the header of entry %s is not what the directory says", human.Quote(e.name))
	}
	return nil
}

// text reads a whole entry of at most limit bytes, and checks its CRC.
func (z *zipFile) text(name string, limit int64) (string, error) {
	e, ok := z.entries[name]
	switch {
	case !ok:
		return "", damaged("the archive holds no %s", human.Quote(name))
	case e.size > limit:
		return "", damaged("entry %s has %d bytes; at most %d are read", human.Quote(name), e.size, limit)
	}
	b, err := z.read(e.at, e.size)
	if err != nil {
		return "", err
	}
	if crc32.ChecksumIEEE(b) != e.crc {
		return "", changed(name)
	}
	if !utf8.Valid(b) {
		return "", damaged("entry %s is not UTF-8", human.Quote(name))
	}
	return string(b), nil
}

func changed(name string) *diag.Error {
	return damaged("entry %s was changed after it was written: its CRC differs", human.Quote(name))
}

// names lists the entries, sorted.
func (z *zipFile) names() []string {
	names := make([]string, 0, len(z.entries))
	for name := range z.entries {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
