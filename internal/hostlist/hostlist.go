package hostlist

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxHosts bounds what a range can expand to: ten times the largest cluster.
const maxHosts = 1_000_000

// maxDigits bounds the numbers in a range, and so the zeros in front of them.
const maxDigits = 9

// Expand expands a list: names are separated by commas, and [a-b,c] in a name stands for each
// number, with as many digits as a has. A suffix ":7000" behind the last name is for all names that
// have no port of their own.
func Expand(list string) (names []string, err error) {
	parts, err := split(list)
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		if names, err = expand(names, part); err != nil {
			return nil, err
		}
	}
	if n := len(names); n > 0 {
		if at := strings.LastIndexByte(names[n-1], ':'); at >= 0 {
			for i, name := range names {
				if !strings.Contains(name, ":") {
					names[i] = name + names[n-1][at:]
				}
			}
		}
	}
	return names, nil
}

// split splits a list at the commas outside of brackets. An IPv6 address has brackets, too, and no
// comma in them.
func split(list string) (parts []string, err error) {
	depth, from := 0, 0
	for i, c := range list + "," {
		switch {
		case c == '[':
			depth++
		case c == ']':
			depth--
		case c == ',' && depth == 0:
			if part := strings.TrimSpace((list + ",")[from:i]); part != "" {
				parts = append(parts, part)
			}
			from = i + 1
		}
		if depth < 0 || depth > 1 {
			return nil, errors.New("brackets do not match")
		}
	}
	if depth != 0 {
		return nil, errors.New("a bracket is not closed")
	}
	return parts, nil
}

// expand appends the names of one part. The first bracket varies slowest.
func expand(names []string, part string) ([]string, error) {
	open := strings.IndexByte(part, '[')
	if open < 0 || strings.ContainsAny(part, ":") && open == 0 { // an IPv6 address
		return append(names, part), nil
	}
	length := strings.IndexByte(part[open:], ']')
	for one := range strings.SplitSeq(part[open+1:open+length], ",") {
		first, last, isRange := strings.Cut(one, "-")
		if !isRange {
			last = first
		}
		from, err := number(first)
		if err != nil {
			return nil, err
		}
		to, err := number(last)
		if err != nil {
			return nil, err
		}
		if to < from || to-from >= maxHosts {
			return nil, fmt.Errorf("the range %q is empty or too long", one)
		}
		for n := from; n <= to; n++ {
			rest := fmt.Sprintf("%s%0*d%s", part[:open], len(first), n, part[open+length+1:])
			if names, err = expand(names, rest); err != nil {
				return nil, err
			}
			if len(names) > maxHosts {
				return nil, errors.New("there are too many hosts")
			}
		}
	}
	return names, nil
}

func number(digits string) (int, error) {
	if digits == "" || len(digits) > maxDigits || strings.Trim(digits, "0123456789") != "" {
		return 0, fmt.Errorf("%q is not a number of a host", digits)
	}
	return strconv.Atoi(digits)
}

// rankVariables are set by launchers to the number of a process among all: Slurm's, an Indexed
// Job's and a JobSet's of Kubernetes, torchrun's, Open MPI's and PMIx's.
var rankVariables = []string{"SLURM_PROCID", "JOB_COMPLETION_INDEX", "RANK", "OMPI_COMM_WORLD_RANK",
	"PMIX_RANK"}

// Rank is the number of this process among all of a run, by the variable that its launcher set; ok
// is false where none is set.
func Rank(getenv func(string) string) (rank int, variable string, ok bool) {
	for _, name := range rankVariables {
		if n, err := strconv.Atoi(getenv(name)); err == nil && n >= 0 {
			return n, name, true
		}
	}
	return 0, "", false
}
