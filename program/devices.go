package program

import (
	"fmt"
	"strconv"
	"strings"
)

// Devices is a list of device numbers, in order. In a file it is a string of ranges, "0-7,16-23",
// so that 100,000 devices take a dozen letters.
type Devices []int

// Range lists n devices from first on.
func Range(first, n int) Devices {
	d := make(Devices, n)
	for i := range d {
		d[i] = first + i
	}
	return d
}

// String writes the ranges.
func (d Devices) String() string {
	var b strings.Builder
	for i := 0; i < len(d); {
		j := i
		for j+1 < len(d) && d[j+1] == d[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(d[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(d[j]))
		}
		i = j + 1
	}
	return b.String()
}

// maxDevices bounds what a file may ask us to allocate: ten times the largest cluster we plan for.
const maxDevices = 1 << 20

// MarshalText implements encoding.TextMarshaler.
func (d Devices) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what String writes.
func (d *Devices) UnmarshalText(text []byte) error {
	var read Devices
	if len(text) == 0 {
		*d = read
		return nil
	}
	for part := range strings.SplitSeq(string(text), ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(lo)
		last := first
		if err == nil && isRange {
			last, err = strconv.Atoi(hi)
		}
		if err != nil || first < 0 || last < first || last-first >= maxDevices-len(read) {
			return fmt.Errorf("%q is not a list of devices like 0-7,16-23", text)
		}
		read = append(read, Range(first, last-first+1)...)
	}
	*d = read
	return nil
}
