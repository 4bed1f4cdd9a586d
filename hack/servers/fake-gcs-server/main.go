// fake-gcs-server: the emulator of Google Cloud Storage of that name, with what its XML API lacks and clients of it use:
// tokens of service accounts, ETags of uploads, conditions, uploads in parts, and 404 for no bucket.
// https://cloud.google.com/storage/docs/xml-api/overview
package main

import (
	"bytes"
	"crypto"
	"crypto/md5"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"encoding/xml"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

const metadata = "X-Goog-Meta-"

// part is what was sent of an upload under one number.
type part struct {
	etag string
	data []byte
}

// upload is a file that comes in parts.
type upload struct {
	attrs fakestorage.ObjectAttrs
	parts map[int]part
}

// server stands before the emulator and answers what it does not.
type server struct {
	fake    *fakestorage.Server
	account *rsa.PublicKey

	mutex   sync.Mutex // conditions hold until what depends on them is done
	uploads map[string]*upload
}

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "address")
	account := flag.String("account", "", "file with the service account's public key (PEM)")
	flag.Parse()
	fake, err := fakestorage.NewServerWithOptions(fakestorage.Options{NoListener: true, PublicHost: "127.0.0.1"})
	fatal(err)
	text, err := os.ReadFile(*account)
	fatal(err)
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKIXPublicKey(block.Bytes)
	fatal(err)
	served := &server{fake: fake, account: key.(*rsa.PublicKey), uploads: map[string]*upload{}}
	fatal(http.ListenAndServe(*listen, served))
}

func fatal(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/storage/v1/") { // who runs the tests makes buckets
		s.fake.HTTPHandler().ServeHTTP(w, r)
		return
	}
	if !s.admits(r) {
		refuse(w, http.StatusUnauthorized, "AuthenticationRequired")
		return
	}
	body, err := io.ReadAll(r.Body)
	if err == nil && !s.answers(w, r, body) {
		s.fake.HTTPHandler().ServeHTTP(w, r)
	}
}

// answers does what the emulator lacks, and says whether that was all.
func (s *server) answers(w http.ResponseWriter, r *http.Request, body []byte) bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	bucket, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	_, missing := s.fake.Backend().GetBucket(bucket)
	query := r.URL.Query()
	switch id := query.Get("uploadId"); {
	case missing != nil:
		refuse(w, http.StatusNotFound, "NoSuchBucket")
	case name == "":
		return false
	case r.Method == http.MethodPost && query.Has("uploads"):
		s.begin(w, attributes(r, bucket, name))
	case id != "" && s.uploads[id] == nil:
		refuse(w, http.StatusNotFound, "NoSuchUpload")
	case id != "" && r.Method == http.MethodPut:
		s.take(w, s.uploads[id], query.Get("partNumber"), body)
	case id != "" && r.Method == http.MethodPost:
		s.complete(w, id, body)
	case id != "" && r.Method == http.MethodDelete:
		delete(s.uploads, id)
		w.WriteHeader(http.StatusNoContent)
	case !s.holds(r, bucket, name):
		refuse(w, http.StatusPreconditionFailed, "PreconditionFailed")
	case r.Method == http.MethodPut:
		s.create(w, attributes(r, bucket, name), body)
	default:
		return false
	}
	return true
}

func attributes(r *http.Request, bucket, name string) fakestorage.ObjectAttrs {
	noted := map[string]string{}
	for key := range r.Header {
		if note, found := strings.CutPrefix(key, metadata); found {
			noted[strings.ToLower(note)] = r.Header.Get(key)
		}
	}
	return fakestorage.ObjectAttrs{BucketName: bucket, Name: name, ContentType: r.Header.Get("Content-Type"), Metadata: noted}
}

// admits says whether the bearer's token was signed by the service account; what it says is not looked at.
func (s *server) admits(r *http.Request) bool {
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	end := max(strings.LastIndex(token, "."), 0)
	signature, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(token[end:], "."))
	sum := sha256.Sum256([]byte(token[:end]))
	return err == nil && rsa.VerifyPKCS1v15(s.account, crypto.SHA256, sum[:], signature) == nil
}

// holds says whether the request's conditions are met by what is there.
func (s *server) holds(r *http.Request, bucket, name string) bool {
	there, err := s.fake.GetObjectStreaming(bucket, name)
	if err == nil {
		defer there.Close()
	}
	if wanted := r.Header.Get("X-Goog-If-Generation-Match"); wanted != "" && wanted != strconv.FormatInt(there.Generation, 10) {
		return false
	}
	wanted := r.Header.Get("If-Match")
	return wanted == "" || err != nil || wanted == fmt.Sprintf("%q", there.Etag)
}

// create makes the object, and returns its ETag.
func (s *server) create(w http.ResponseWriter, attrs fakestorage.ObjectAttrs, data []byte) string {
	fatal(s.fake.CreateObjectStreaming(fakestorage.Object{ObjectAttrs: attrs, Content: data}.StreamingObject()))
	made, err := s.fake.GetObjectStreaming(attrs.BucketName, attrs.Name)
	fatal(err)
	defer made.Close()
	etag := fmt.Sprintf("%q", made.Etag)
	w.Header().Set("ETag", etag)
	w.Header().Set("X-Goog-Generation", strconv.FormatInt(made.Generation, 10))
	return etag
}

func (s *server) begin(w http.ResponseWriter, attrs fakestorage.ObjectAttrs) {
	id := rand.Text()
	s.uploads[id] = &upload{attrs: attrs, parts: map[int]part{}}
	fmt.Fprintf(w, "<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>", id)
}

func (s *server) take(w http.ResponseWriter, to *upload, asked string, data []byte) {
	number, err := strconv.Atoi(asked)
	if err != nil {
		refuse(w, http.StatusBadRequest, "InvalidArgument")
		return
	}
	etag := fmt.Sprintf("\"%x\"", md5.Sum(data))
	to.parts[number] = part{etag: etag, data: data}
	w.Header().Set("ETag", etag)
}

func (s *server) complete(w http.ResponseWriter, id string, body []byte) {
	var asked struct {
		Part []struct {
			PartNumber int
			ETag       string
		}
	}
	if xml.Unmarshal(body, &asked) != nil {
		refuse(w, http.StatusBadRequest, "MalformedXML")
		return
	}
	var whole bytes.Buffer
	for _, named := range asked.Part {
		sent, found := s.uploads[id].parts[named.PartNumber]
		if !found || sent.etag != named.ETag {
			refuse(w, http.StatusBadRequest, "InvalidPart")
			return
		}
		whole.Write(sent.data)
	}
	etag := s.create(w, s.uploads[id].attrs, whole.Bytes())
	delete(s.uploads, id)
	fmt.Fprint(w, "<CompleteMultipartUploadResult><ETag>")
	xml.EscapeText(w, []byte(etag))
	fmt.Fprint(w, "</ETag></CompleteMultipartUploadResult>")
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
}
