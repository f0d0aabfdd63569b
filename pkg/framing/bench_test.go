package framing

import "testing"

// BenchmarkHead is what the check of a browser's head costs.
func BenchmarkHead(b *testing.B) {
	head := []byte("GET /api/v1/things?page=2 HTTP/1.1\r\nHost: api.example.com\r\nConnection: keep-alive\r\n" +
		"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0.0.0 Safari/537.36\r\n" +
		"Accept: application/json\r\nAccept-Encoding: gzip, deflate, br\r\nAccept-Language: en-US,en;q=0.9\r\n" +
		"X-API-Key: 0123456789abcdef\r\nReferer: https://app.example.com/\r\n\r\n")
	s := new(scanner)
	b.SetBytes(int64(len(head)))
	b.ReportAllocs()
	for b.Loop() {
		if _, refusal := s.scan(head); refusal != "" {
			b.Fatal(refusal)
		}
	}
}
